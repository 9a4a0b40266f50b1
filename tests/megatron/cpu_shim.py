"""Patches that let megatron-core, which supports only CUDA devices, run on a CPU.

Tests install them before they import megatron. They cover the functions of megatron-core 0.16.1
that the Megatron engine uses.
"""

from collections.abc import Callable
from typing import Any

import torch

CUDA_NAMES = {torch.float32: "torch.cuda.FloatTensor", torch.bfloat16: "torch.cuda.BFloat16Tensor"}


def install() -> None:
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign, assignment]
    plain = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (
            plain(self, *args, **kwargs)
            if args or kwargs
            else CUDA_NAMES.get(self.dtype, plain(self))
        )

    torch.Tensor.type = type_name  # type: ignore[method-assign, assignment]
    # Megatron's layers need autocast in the backward pass, too.
    for name in ("custom_fwd", "custom_bwd"):
        setattr(torch.amp, name, _for_cpu(getattr(torch.amp, name)))

    from megatron.core import utils
    from megatron.core.optimizer import clip_grads, optimizer
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    for module in (utils, clip_grads, optimizer, schedules):
        # Only Megatron gets the replacement: transformers depends on torch's constructors.
        module.torch = _Torch()


def _for_cpu(decorator: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, device_type, **kwargs: decorator(*args, device_type="cpu", **kwargs)


class _Torch:
    """torch with constructors that create "cuda" tensors on the CPU."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        return _on_cpu(value) if name in ("zeros", "tensor") else value


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, device=None, **kwargs: make(
        *args, device="cpu" if device == "cuda" else device, **kwargs
    )
