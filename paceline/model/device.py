"""The device that this process computes on."""

import torch


def default_device() -> torch.device:
    """Return the current GPU, or the CPU if there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
