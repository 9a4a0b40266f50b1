"""Speed of the train backends on one GPU: single device, FSDP2 and Megatron with one rank each.

    python benchmarks/gpu_backends.py [--out benchmarks/results/gpu_backends.json]

All backends do the same updates (forward, backward, clipping, AdamW), interleaved, with random
weights in the shape of Qwen2.5-0.5B. Also measures offloading to host memory. Megatron is left out
if megatron-core is not installed.
"""

import copy
import json
import os
import statistics
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_load import PROMPT, make_model  # noqa: E402
from benchmarks.gpu_train import COMPLETION, make_batch, update  # noqa: E402
from benchmarks.report import RESULTS, command_line, gpu_circumstances, write  # noqa: E402
from paceline.training.engine import TrainEngine  # noqa: E402
from paceline.training.fsdp import Fsdp  # noqa: E402
from paceline.training.settings import TrainSettings  # noqa: E402
from paceline.training.single import SingleDevice  # noqa: E402

SETTINGS = TrainSettings(dtype="bfloat16", micro_batch_tokens=16384)
LOADS = {"many_micro_batches": 256, "one_micro_batch": 25}  # rows per update
WARM_UP, ROUNDS = 2, 5
TARGET_FRACTION = 0.9


def make_engines() -> dict[str, TrainEngine]:
    model = make_model("0.5B", torch.float32)
    engines: dict[str, TrainEngine] = {
        "single": SingleDevice(copy.deepcopy(model), SETTINGS),
        "fsdp": Fsdp(copy.deepcopy(model), SETTINGS),
    }
    if find_spec("megatron"):
        from paceline.training.megatron.engine import Megatron

        engines["megatron"] = Megatron(model.config, model.state_dict(), SETTINGS)
    return engines


def measure(engines: dict[str, TrainEngine], rows: int) -> dict[str, dict[str, Any]]:
    """Measure the engines interleaved, so that a disturbance affects all of them alike."""
    batch = make_batch(rows, 1)
    times: dict[str, list[float]] = {name: [] for name in engines}
    peaks = dict.fromkeys(engines, 0)
    for number in range(WARM_UP + ROUNDS):
        for name, engine in engines.items():
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            seconds = sum(update(engine, batch))
            if number >= WARM_UP:
                times[name].append(seconds)
                peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated() - before)
    single = statistics.median(times["single"])
    return {
        name: {
            "tokens_per_s": round(batch.num_tokens / statistics.median(found)),
            "seconds": [round(s, 4) for s in found],
            "fraction_of_single": round(single / statistics.median(found), 3),
            "update_memory_GiB": round(peaks[name] / 2**30, 1),
        }
        for name, found in times.items()
    }


def offload(engine: TrainEngine) -> dict[str, float]:
    """Measure the second offload; the first one also allocates pinned memory."""
    for _ in range(2):
        offloaded, restored = engine.place("host"), engine.place("device")
    return {
        "bytes": offloaded.bytes,
        "offload_s": round(offloaded.seconds, 4),
        "restore_s": round(restored.seconds, 4),
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_backends.json")
    options = parser.parse_args()
    torch.cuda.set_device(0)
    store = os.path.join(tempfile.mkdtemp(), "store")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=0, world_size=1
    )
    started = time.perf_counter()
    engines = make_engines()
    print(f"{', '.join(engines)}: built in {time.perf_counter() - started:.1f} s", flush=True)
    results = gpu_circumstances() | {
        "load": f"0.5B; {PROMPT}-token prompts, {COMPLETION}-token completions; bfloat16 matmuls, "
        f"float32 weights and AdamW; interleaved updates, medians of {ROUNDS}; "
        f"micro-batches of {SETTINGS.micro_batch_tokens} tokens",
        "target": f"fsdp: {TARGET_FRACTION} of single",
    }
    for name, rows in LOADS.items():
        results[name] = {"rows": rows, **measure(engines, rows)}
        print(name, json.dumps(results[name]), flush=True)
        write(options.out, results)
    results["offload"] = {name: offload(engine) for name, engine in engines.items()}
    print("offload", json.dumps(results["offload"]), flush=True)
    write(options.out, results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
