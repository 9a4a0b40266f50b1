"""When a device is full during training: what holds its memory, and what to do about it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from paceline.errors import OutOfMemory
from paceline.train.settings import TrainSettings


@contextmanager
def memory_explained(
    device: torch.device, settings: TrainSettings, held: Callable[[], Mapping[str, int]]
) -> Iterator[None]:
    """Turns torch's error into one that says what holds the memory. `held`: bytes by what they are for, asked only then."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(_message(device, settings, held(), str(error))) from error


def _message(
    device: torch.device, settings: TrainSettings, known: Mapping[str, int], said: str
) -> str:
    holders = dict(known)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        ours, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        holders["activations and other tensors of this process"] = max(
            0, ours - sum(known.values())
        )
        holders["kept by torch for reuse"] = reserved - ours
        holders["other processes and the driver"] = max(0, total - free - reserved)
        holders["free"] = free
    parts = ", ".join(f"{what} {size / 2**30:.2f} GiB" for what, size in holders.items() if size)
    tips = [f"lower train.micro_batch_tokens (now {settings.micro_batch_tokens})"]
    tips += [] if settings.gradient_checkpointing else ["set train.gradient_checkpointing = true"]
    tips += (
        []
        if settings.offload
        else [
            "on a device shared with generation set train.offload = true or lower rollout.kv_memory_fraction"
        ]
    )
    return f"training ran out of memory on {device} ({said.partition('. ')[0]}). Held there: {parts}. {'; '.join(tips)}"
