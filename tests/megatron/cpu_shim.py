"""Lets megatron-core, which knows only CUDA devices, run on CPU: its calls to torch.cuda are answered for the CPU.

Only tests install this, before they import megatron. It covers what this engine's paths touch in megatron-core 0.16.1.
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
    for name in ("custom_fwd", "custom_bwd"):  # so that Megatron's layers see autocast in the backward pass
        setattr(torch.amp, name, _for_cpu(getattr(torch.amp, name)))
    for name in ("zeros", "tensor", "empty", "ones"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign, assignment]
    plain = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return plain(self, *args, **kwargs) if args or kwargs else CUDA_NAMES.get(self.dtype, plain(self))

    torch.Tensor.type = type_name  # type: ignore[method-assign, assignment]
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return made


def _for_cpu(decorator: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, device_type, **kwargs: decorator(*args, device_type="cpu", **kwargs)
