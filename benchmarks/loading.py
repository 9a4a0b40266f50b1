"""Memory and time of two FSDP ranks that open a model of 1 GB, save a checkpoint and resume.

    python benchmarks/loading.py --folder /dev/shm [--label NAME]

Peaks are what a rank's resident memory grows by, in MB, on top of what it held before: to open a
model, that includes its shard; to save and load, the shards of weights and optimizer state exist
already. A folder in memory leaves the disk out of the seconds; the processor's seconds of a rank
depend little on what else the machine does. A label keeps the rows of other
versions, which run the same script with another PYTHONPATH.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.append(str(Path(__file__).parents[1]))  # after PYTHONPATH, which may name a version
from benchmarks.report import RESULTS, circumstances, command_line, write
from paceline.algo.loss import PolicyLoss
from paceline.algo.settings import AlgorithmSettings
from paceline.remote.peak import take_peak_memory
from paceline.training.checkpoint import latest_checkpoint, save_checkpoint
from paceline.training.fsdp import Fsdp
from paceline.training.settings import TrainSettings
from paceline.types import Batch

RANKS = 2
SHAPE = {
    "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16,
    "num_attention_heads": 16, "num_key_value_heads": 4, "tie_word_embeddings": False,
}  # fmt: skip
Found = dict[str, float]


@contextmanager
def measure(found: Found, name: str) -> Iterator[None]:
    """Record seconds and peak memory of a part that all ranks begin together."""
    dist.barrier()
    take_peak_memory()
    before, start, cpu = take_peak_memory(), time.perf_counter(), time.process_time()
    yield
    found[f"{name}_s"] = round(time.perf_counter() - start, 2)
    found[f"{name}_cpu_s"] = round(time.process_time() - cpu, 2)
    found[f"{name}_peak_mb"] = round((take_peak_memory() - before) / 1e6)


def train(engine: Fsdp) -> None:
    """Make a step, so that the optimizer has state."""
    tokens, mask = np.arange(8, dtype=np.int32), np.arange(8) > 0
    zeros, one = np.zeros(8, np.float32), np.ones(1, np.int32)
    batch = Batch(
        tokens, one * 8, mask, zeros, tokens * 0, zeros[:1], one * 0, advantages=zeros + 1
    )
    engine.forward_backward(batch, PolicyLoss(AlgorithmSettings()))
    engine.optimizer_step(1e-5)


def run_rank(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=RANKS)
    found: Found = {}
    with measure(found, "open"):
        engine = Fsdp.open(path, TrainSettings(backend="fsdp"), 1.0, "policy")
    train(engine)
    root = Path(path, "checkpoints")

    async def write(folder: Path) -> None:
        dist.barrier()  # the other rank waits for the directory
        with measure(found, "save"):
            engine.save(folder)
        dist.barrier()

    with measure(found, "checkpoint"):
        if rank == 0:
            asyncio.run(save_checkpoint(root, 1, {}, write, 1))
        else:
            asyncio.run(write(root / ".step_00000001.tmp"))
    del found["checkpoint_peak_mb"]
    with measure(found, "verify"):
        if rank == 0:
            latest_checkpoint(root)
    with measure(found, "load"):
        engine.load(root / "step_00000001")
    Path(path, f"rank{rank}.txt").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--label", default="now", help="name of the row in the results")
    parser.add_argument("--folder", help="where to write the model and the checkpoint")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        model = Qwen2ForCausalLM(Qwen2Config(**SHAPE))
        model.save_pretrained(folder)
        sizes = [parameter.nbytes for parameter in model.parameters()]
        del model
        spawn(run_rank, (folder,), nprocs=RANKS)
        ranks = [json.loads(Path(folder, f"rank{n}.txt").read_text()) for n in range(RANKS)]
    path = RESULTS / "loading.json"
    old = json.loads(path.read_text())["rows"] if path.exists() else {}
    result = circumstances() | {
        "versions": {"torch": torch.__version__},
        "ranks": RANKS,
        "model_mb": sum(sizes) / 1e6,
        "largest_tensor_mb": max(sizes) / 1e6,
        "rows": old | {options.label: ranks},
    }
    write(path, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
