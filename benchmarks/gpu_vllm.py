"""vLLM as the rollout engine on one GPU: weight sync, sleep and wake, hybrid phases, log-probs.

    python benchmarks/gpu_vllm.py [--out benchmarks/results/gpu_vllm.json]

Measures the weight transfer by CUDA IPC, the time to sleep and wake, the memory of each phase of a
hybrid run, and the difference of the log-probs from a float32 forward pass. Times are medians.
Random weights in the shape of Qwen2.5-0.5B.
"""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_load import PROMPT  # noqa: E402
from benchmarks.gpu_loop import make_model, make_prompts, prepare_runs  # noqa: E402
from benchmarks.report import RESULTS, command_line, gpu_circumstances, read_metrics, write  # noqa: E402
from paceline.config import RunConfig, load_config  # noqa: E402
from paceline.remote.process import ProcessWorker  # noqa: E402
from paceline.rollout.client import EngineClient  # noqa: E402
from paceline.rollout.vllm_settings import VllmSettings, check_vllm  # noqa: E402
from paceline.run import train  # noqa: E402
from paceline.sync.connect import connect  # noqa: E402
from paceline.types import Completion, Request, Role, Sampling  # noqa: E402
from paceline.workers.build import build_parts  # noqa: E402

TARGETS = {"sync_s": 0.5, "sleep_and_wake_s": 2.0}
STEPS = 5


def settings(model: str, prompts: str, run_dir: Path, small: bool) -> list[str]:
    return [
        f"model={model}",
        f"data.path={prompts}",
        f"run_dir={run_dir}",
        "data.chat=false",
        f"data.max_prompt_length={PROMPT}",
        "rollout.engine=vllm",
        "rollout.vllm.eager=true",
        "rollout.max_response_length=128",
        "rollout.slots=256",
        "rollout.temperature=0.8",
        "rollout.generation_timeout=300",
        f"train.dtype={'float32' if small else 'bfloat16'}",
        f"groups_per_step={2 if small else 16}",
        f"group_size={2 if small else 8}",
        f"steps={STEPS}",
        "save_every=0",
        f"reward.function={ROOT}/tests/rewards.py:letters",
    ]


def make_requests(count: int, seed: int, tokens: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [
        Request(
            f"{seed}.{n}",
            tuple(int(t) for t in rng.integers(5, 90, PROMPT)),
            seed + n,
            Sampling(tokens, temperature=0.8),
        )
        for n in range(count)
    ]


@torch.no_grad()
def logprob_diff(
    model: Any, requests: list[Request], completions: list[Completion]
) -> dict[str, float]:
    """Compare the engine's log-probs with a plain forward pass of the same weights."""
    found = []
    for request, completion in zip(requests, completions, strict=True):
        ids = torch.tensor([[*request.prompt, *completion.tokens.tolist()]], device=model.device)
        logprobs = torch.log_softmax(
            model(ids).logits[0, PROMPT - 1 : -1].float() / request.sampling.temperature, -1
        )
        expected = logprobs.gather(1, ids[0, PROMPT:, None])[:, 0].cpu().numpy()
        found.append(np.abs(expected - completion.logprobs))
    distances = np.concatenate(found)
    return {
        "mean": float(distances.mean()),
        "max": float(distances.max()),
        "tokens": len(distances),
    }


async def sync(config: RunConfig, model: str, directory: Path) -> dict[str, Any]:
    """Measure the weight sync between a trainer and an engine process on the same GPU."""
    started = time.perf_counter()
    workers = {
        role: ProcessWorker(
            role.value,
            build_parts,
            ((role,), config, model, 4),
            cores=[],
            threads=4,
            log_path=directory / f"{role.value}.log",
        )
        for role in (Role.ACTOR, Role.ROLLOUT)
    }
    try:
        await asyncio.gather(*(worker.ready() for worker in workers.values()))
        ready_s = time.perf_counter() - started
        trainer, engine = workers[Role.ACTOR], EngineClient(workers[Role.ROLLOUT])
        path = await connect("auto", True, trainer, [workers[Role.ROLLOUT]], config.train.dtype)
        times = []
        for version in range(1, 7):
            began = time.perf_counter()
            weights = await path.publish(version)
            published = time.perf_counter()
            await engine.load_weights(weights)
            times.append((published - began, time.perf_counter() - published))
        requests = make_requests(32, 1000, 64)
        completions = await asyncio.gather(*(engine.generate(request) for request in requests))
        load = make_requests(256, 5000, 128)
        began = time.perf_counter()
        tokens = sum(
            map(len, await asyncio.gather(*(engine.generate(request) for request in load)))
        )
        speed = tokens / (time.perf_counter() - began)
        versions = {int(version) for completion in completions for version in completion.versions}
    finally:
        await asyncio.gather(*(worker.close() for worker in workers.values()))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).eval()
    return {
        "transport": type(path).__name__,
        "start_s": round(ready_s, 1),
        "publish_s": [round(p, 4) for p, _ in times],
        "load_s": [round(loaded, 4) for _, loaded in times],
        "sync_s": round(statistics.median(p + loaded for p, loaded in times[1:]), 4),
        "sync_max_s": round(max(p + loaded for p, loaded in times[1:]), 4),
        "versions": sorted(versions),
        "logprob_diff_to_float32_transformers": logprob_diff(reference, requests, completions),
        "tokens_per_s_256_eager": round(speed),
    }


def hybrid(config: RunConfig) -> dict[str, Any]:
    """Run hybrid sync on one pool.

    vLLM sleeps during train steps; the trainer's state is offloaded to host memory otherwise.
    """
    summary = asyncio.run(train(config))
    rows = read_metrics(config.run_dir)
    shown = (
        "time/wait_s",
        "time/train_s",
        "time/sync_s",
        "train/logprob_diff_mean",
        "train/logprob_diff_max",
        "train/offload_s",
    )
    return {
        "steps": summary["steps"],
        "ledger": summary["ledger"],
        "memory_GiB": {
            phase: round(size / 2**30, 2) for phase, size in summary["memory_phases"].items()
        },
        "rows": [{name: row[name] for name in shown if name in row} for row in rows],
    }


def sleep(config: RunConfig, model: str) -> dict[str, Any]:
    """Measure sleep and wake of an engine in this process."""
    from paceline.rollout.vllm import VllmEngine

    engine = VllmEngine(
        model,
        VllmSettings(eager=True),
        dtype=config.train.dtype,
        slots=256,
        max_length=2 * PROMPT,
        sleeps=True,
    )
    engine.load(AutoModelForCausalLM.from_pretrained(model).state_dict(), 1)
    before = _generate(engine, 0)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        used = _used()
        engine.sleep()
        asleep, remaining = time.perf_counter(), _used()
        engine.wake()
        times.append((asleep - began, time.perf_counter() - asleep, used - remaining))
    same = all(
        np.array_equal(one.tokens, other.tokens)
        for one, other in zip(before, _generate(engine, 1), strict=True)
    )
    return {
        "sleep_s": [round(s, 4) for s, _, _ in times],
        "wake_s": [round(w, 4) for _, w, _ in times],
        "sleep_and_wake_s": round(statistics.median(s + w for s, w, _ in times), 4),
        "freed_GiB": round(times[-1][2] / 2**30, 2),
        "same_completions": same,
    }


def _generate(engine: Any, number: int) -> list[Completion]:
    """Generate the same completions each time, under different request IDs."""
    requests = [
        Request(f"{number}.{request.id}", request.prompt, request.seed, request.sampling)
        for request in make_requests(16, 0, 32)
    ]
    engine.submit(requests)
    found: dict[str, Completion] = {}
    while engine.has_work:
        found.update(engine.step())
    return [found[request.id] for request in requests]


def _used() -> int:
    free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    return total - free


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument(
        "--small", action="store_true", help="tiny model, to try the program on a CPU"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_vllm.json")
    options = parser.parse_args()
    prepare_runs()
    results = gpu_circumstances() | {
        "vllm": check_vllm(),
        "targets": TARGETS,
    }
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        model = make_model(directory / "model", options.small)
        given = settings(
            model, make_prompts(directory / "prompts.jsonl"), directory / "run", options.small
        )
        parts = {
            "sync": lambda: asyncio.run(sync(load_config(None, given), model, directory)),
            "hybrid": lambda: hybrid(load_config(None, [*given, "train.offload=true"])),
            "sleep": lambda: sleep(load_config(None, given), model),
        }
        for name, part in parts.items():
            try:
                results[name] = part()
            except Exception as error:  # the other parts are still measured
                results[name] = {"failed": f"{type(error).__name__}: {error}"[:3000]}
            print(json.dumps({name: results[name]}, indent=1), flush=True)
            write(options.out, results)


if __name__ == "__main__":
    main()
