"""AdamW as we use it: its settings, its learning rate as a pure function of the step, its state as plain tensors."""

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from paceline.errors import CheckpointError
from paceline.settings import Settings

STATE = ("step", "exp_avg", "exp_avg_sq")


class TrainSettings(Settings):
    learning_rate: float = Field(1e-6, ge=0)
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate falls after the warm-up; linear and cosine reach 0 just after the last step."""
    warmup_steps: int = Field(0, ge=0)
    """The rate rises linearly over these steps; the first one already learns."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled; on matrices only, never on norms and biases."""
    betas: tuple[float, float] = (0.9, 0.999)
    max_grad_norm: float = Field(1.0, gt=0)
    micro_batch_tokens: int = Field(4096, gt=0)
    """Tokens per forward/backward pass. Changes memory and speed, not the gradient."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more work."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What matrix products are computed in. Parameters and optimizer state stay float32."""

    def learning_rate_at(self, step: int, total_steps: int) -> float:
        """The rate of train step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.lr_schedule == "constant":
            return self.learning_rate
        done = min(1.0, (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps))
        return self.learning_rate * (1 - done if self.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))


def adamw(named: dict[str, nn.Parameter], settings: TrainSettings) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=settings.learning_rate, betas=settings.betas, fused=True)


def clip_gradients(parameters: list[nn.Parameter], max_norm: float) -> float:
    """Scale gradients down to `max_norm` if they exceed it; the norm before. Untouched when it is not finite."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if torch.isfinite(norm):
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return float(norm)


def optimizer_state(optimizer: torch.optim.AdamW, named: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Its state as flat tensors: "step:model.norm.weight" and so on. Empty before the first step."""
    return {f"{key}:{name}": optimizer.state[p][key] for name, p in named.items() if p in optimizer.state for key in STATE}


def load_optimizer_state(optimizer: torch.optim.AdamW, named: dict[str, nn.Parameter], state: dict[str, Tensor]) -> None:
    """Take over what `optimizer_state` gave; all or nothing."""
    known = {f"{key}:{name}" for name in named for key in STATE}
    unknown = sorted(set(state) - known)
    if unknown:
        raise CheckpointError(f"optimizer state {unknown[0]!r} ({len(unknown)} such) belongs to no parameter: saved from another model?")
    fresh: dict[Tensor, dict[str, Tensor]] = {}
    for name, parameter in named.items():
        if f"step:{name}" not in state:
            continue
        entry = {key: state[f"{key}:{name}"].to(parameter.device, copy=True) for key in STATE}
        if entry["exp_avg"].shape != parameter.shape:
            raise CheckpointError(f"optimizer state of {name} is {tuple(entry['exp_avg'].shape)}, the parameter {tuple(parameter.shape)}")
        fresh[parameter] = entry
    optimizer.state.clear()
    optimizer.state.update(fresh)
