"""The train back ends on one GPU, doing the same work by turns: single device, FSDP2 with one rank and, where megatron-core is installed,
Megatron with one rank. Tokens per second of whole updates (forward, backward, clipping, AdamW) of random weights in the shape of
Qwen2.5-0.5B, and what offload moves.

    python benchmarks/gpu_backends.py [--out benchmarks/results/gpu_backends.json]
"""

import argparse
import copy
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_engine import make_model  # noqa: E402
from benchmarks.gpu_train import ANSWER, PROMPT, make_batch, update  # noqa: E402
from paceline.train.engine import TrainEngine  # noqa: E402
from paceline.train.fsdp import Fsdp  # noqa: E402
from paceline.train.settings import TrainSettings  # noqa: E402
from paceline.train.single import SingleDevice  # noqa: E402

SETTINGS = TrainSettings(dtype="bfloat16", micro_batch_tokens=16384)
LOADS = {"many_micro_batches": 256, "one_micro_batch": 25}  # rows of an update
WARM_UP, ROUNDS = 2, 5
TARGET_SHARE = 0.9


def make_engines() -> dict[str, TrainEngine]:
    model = make_model("0.5B", torch.float32)
    engines: dict[str, TrainEngine] = {
        "single": SingleDevice(copy.deepcopy(model), SETTINGS),
        "fsdp": Fsdp(copy.deepcopy(model), SETTINGS),
    }
    if find_spec("megatron"):
        from paceline.train.megatron import Megatron

        engines["megatron"] = Megatron(model.config, model.state_dict(), SETTINGS)
    return engines


def measure(engines: dict[str, TrainEngine], rows: int) -> dict[str, dict[str, Any]]:
    """By turns, so that whatever else changes meets all of them."""
    batch = make_batch(rows, 1)
    times: dict[str, list[float]] = {name: [] for name in engines}
    peaks = dict.fromkeys(engines, 0)
    for turn in range(WARM_UP + ROUNDS):
        for name, engine in engines.items():
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            seconds = sum(update(engine, batch))
            if turn >= WARM_UP:
                times[name].append(seconds)
                peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated() - before)
    single = statistics.median(times["single"])
    return {
        name: {
            "tokens_per_s": round(batch.num_tokens / statistics.median(found)), "seconds": [round(s, 4) for s in found],
            "share_of_single": round(single / statistics.median(found), 3), "memory_of_an_update_GiB": round(peaks[name] / 2**30, 1),
        }
        for name, found in times.items()
    }  # fmt: skip


def offload(engine: TrainEngine) -> dict[str, float]:
    """The second time; the first one takes pinned memory."""
    for _ in range(2):
        away, back = engine.place("host"), engine.place("device")
    return {"bytes": away.bytes, "away_s": round(away.seconds, 4), "back_s": round(back.seconds, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_backends.json"
    )
    options = parser.parse_args()
    torch.cuda.set_device(0)
    store = os.path.join(tempfile.mkdtemp(), "store")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=0, world_size=1
    )
    started = time.perf_counter()
    engines = make_engines()
    print(f"{', '.join(engines)}: made in {time.perf_counter() - started:.1f} s", flush=True)
    results: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "command": "python benchmarks/gpu_backends.py", "python": platform.python_version(),
        "torch": torch.__version__, "cuda": torch.version.cuda, "transformers": transformers.__version__,
        "load": f"0.5B; {PROMPT}-token prompts, {ANSWER}-token answers; products in bfloat16, float32 weights and AdamW; whole updates by "
        f"turns, medians of {ROUNDS}; micro-batches of {SETTINGS.micro_batch_tokens} tokens",
        "target": f"fsdp: {TARGET_SHARE} of single",
    }  # fmt: skip
    for name, rows in LOADS.items():
        results[name] = {"rows": rows, **measure(engines, rows)}
        print(name, json.dumps(results[name]), flush=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    results["offload"] = {name: offload(engine) for name, engine in engines.items()}
    print("offload", json.dumps(results["offload"]), flush=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
