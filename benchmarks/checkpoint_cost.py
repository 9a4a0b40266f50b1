"""What a checkpoint after every step adds to the step time of a model with 135M parameters.

    python benchmarks/checkpoint_cost.py [--tokens 2048] [--blocks 3] [--folder DIR] [--model DIR]

On a GPU, with a real model and the tokens of a real step:

    python benchmarks/checkpoint_cost.py --model SmolLM2-135M --tokens 65536 --folder DISK

The trainer is a thread, as in hybrid runs, with random weights unless `--model` is a model
directory. It computes in bfloat16 on a GPU. Blocks of steps with and without
checkpoints alternate, so that other load on the machine meets both; the cost is the ratio of the
medians of their steps, minus 1. Every step counts that copies its checkpoint while the one before
is being written. "alone_s" is the time of a checkpoint that training waits for, "alone_cpu_s" its
CPU time, and "waited_s" what all steps together waited for the disk. Exit code 1 if the cost is
above the limit of 5 %.
"""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.report import RESULTS, circumstances, command_line, device, machine, write
from paceline.algo.settings import AlgorithmSettings
from paceline.model.loading import default_device
from paceline.remote.thread import ThreadWorker
from paceline.training.actor import Actor
from paceline.training.checkpoint import save_checkpoint
from paceline.training.saving import Saver
from paceline.training.service import ActorService
from paceline.training.settings import TrainSettings
from paceline.training.single import SingleDevice
from paceline.types import Batch

LIMIT = 0.05
ROW = 64  # tokens
BLOCK = 3  # steps
SHAPE = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip


def build(name: str | None) -> dict[str, ActorService]:
    torch.manual_seed(0)
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    settings = TrainSettings(learning_rate=1e-6, dtype=dtype)
    if name is None:
        model = LlamaForCausalLM(LlamaConfig(**SHAPE)).to(default_device())
        engine = SingleDevice(model, settings)
    else:
        engine = SingleDevice.open(name, settings, 1.0, "policy")
    actor = Actor(engine, AlgorithmSettings(), settings, 1000)
    return {"actor": ActorService(actor)}


def batch(tokens: int) -> Batch:
    rows = tokens // ROW
    flat = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], rows * ROW).astype(np.int32)
    mask = np.tile(np.arange(ROW) > 0, rows)
    zeros = np.zeros(rows * ROW, np.float32)
    lengths = np.full(rows, ROW, np.int32)
    return Batch(flat, lengths, mask, zeros, flat * 0, zeros[:rows], lengths * 0)


def save(
    root: Path, worker: ThreadWorker, step: int, copied: Callable[[], None] | None
) -> Coroutine[Any, Any, Path]:
    async def write(folder: Path) -> None:
        if copied is None:
            return await worker.call("actor", "save", str(folder))
        await worker.call("actor", "snapshot", str(folder))
        copied()
        await worker.call("actor", "written")

    return save_checkpoint(root, step, {"step": step}, write, keep=1)


async def measure(tokens: int, blocks: int, folder: str, model: str | None) -> dict[str, Any]:
    worker, data = ThreadWorker("train", build, (model,)), batch(tokens)
    await worker.ready()
    root = Path(folder)
    saver = Saver(partial(save, root, worker), every=1, every_s=0.0)
    seconds: dict[str, list[float]] = {"none": [], "saved": []}
    step, waited = 0, 0.0
    for block in ["warm-up", *["none", "saved"] * blocks]:
        for number in range(BLOCK):
            step += 1
            begun = time.perf_counter()
            await worker.call("actor", "fit", data, step)
            if block != "none":
                await saver.save(step)
            if number and block != "warm-up":  # before the first step there is no checkpoint
                seconds[block].append(time.perf_counter() - begun)
                waited += saver.metrics()["time/save_wait_s"]
        await saver.written()
        saver.metrics()
    begun, cpu = time.perf_counter(), time.process_time()
    await saver.save(step + 1, beside=False)
    alone, cpu = time.perf_counter() - begun, time.process_time() - cpu
    size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    await worker.close()
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    return {
        "checkpoint_mb": round(size / 1e6),
        "step_s": round(medians["none"], 3),
        "step_with_checkpoint_s": round(medians["saved"], 3),
        "cost": round(medians["saved"] / medians["none"] - 1, 4),
        "waited_s": round(waited, 3),
        "alone_s": round(alone, 3),
        "alone_cpu_s": round(cpu, 3),
        "steps": {name: [round(s, 3) for s in found] for name, found in seconds.items()},
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--folder", default=None, help="where checkpoints are written")
    parser.add_argument("--model", default=None, help="model directory; default: random weights")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found = asyncio.run(measure(args.tokens, args.blocks, folder, args.model))
    report = circumstances() | {
        "machine": f"{device()}, {machine()}",
        "versions": {"torch": torch.__version__},
        "tokens_per_step": args.tokens,
        "limit": LIMIT,
        **found,
    }
    write(RESULTS / "checkpoint_cost.json", report)
    print(json.dumps(report, indent=1))
    sys.exit(found["cost"] > LIMIT)


if __name__ == "__main__":
    main()
