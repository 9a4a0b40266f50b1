"""Error message for a device that runs out of memory: what holds the memory, and what to change."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from paceline.errors import OutOfMemory
from paceline.training.settings import TrainSettings


@contextmanager
def explain_out_of_memory(
    device: torch.device, settings: TrainSettings, held: Callable[[], Mapping[str, int]]
) -> Iterator[None]:
    """Turn torch's error into an OutOfMemory that lists what holds the memory.

    `held` returns the known bytes by purpose; it is called only after an error.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(_message(device, settings, held(), str(error))) from error


def _message(
    device: torch.device, settings: TrainSettings, known: Mapping[str, int], reason: str
) -> str:
    holders = dict(known)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        ours, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        holders["activations and other tensors of this process"] = max(
            0, ours - sum(known.values())
        )
        holders["cached by torch"] = reserved - ours
        holders["other processes and the driver"] = max(0, total - free - reserved)
        holders["free"] = free
    parts = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in holders.items() if size)
    tips = [f"lower train.micro_batch_tokens (now {settings.micro_batch_tokens})"]
    if not settings.gradient_checkpointing:
        tips.append("set train.gradient_checkpointing = true")
    if not settings.offload:
        tips.append(
            "on a device shared with generation, set train.offload = true or lower "
            "rollout.kv_memory_fraction"
        )
    return (
        f"training ran out of memory on {device} ({reason.partition('. ')[0]}). "
        f"Memory in use: {parts}. To reduce it: {'; '.join(tips)}"
    )
