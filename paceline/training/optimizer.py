"""AdamW: parameter groups, gradient clipping, and its state as plain tensors."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from paceline.errors import CheckpointError
from paceline.model.tensor_file import Shape
from paceline.training.settings import TrainSettings

STATE = ("step", "exp_avg", "exp_avg_sq")


def adamw(named: dict[str, nn.Parameter], settings: TrainSettings) -> torch.optim.AdamW:
    groups = [
        {
            "params": [p for p in named.values() if p.ndim >= 2],
            "weight_decay": settings.weight_decay,
        },
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=settings.learning_rate,
        betas=settings.betas,
        fused=True,
    )


def clip_gradients(parameters: list[nn.Parameter], max_norm: float) -> float:
    """Scale gradients down to `max_norm` if they exceed it; return the norm before.

    Gradients with a norm that is not finite stay unchanged.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if torch.isfinite(norm):
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return float(norm)


def optimizer_state(
    optimizer: torch.optim.AdamW, named: dict[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Return the state by keys such as "step:model.norm.weight"; empty before the first step."""
    return {
        f"{key}:{name}": optimizer.state[p][key]
        for name, p in named.items()
        if p in optimizer.state
        for key in STATE
    }


def check_optimizer_state(saved: Mapping[str, Shape], own: Mapping[str, Shape]) -> None:
    """Raise CheckpointError unless saved state, by its shapes, is that of these parameters."""
    expected = {f"{key}:{name}": shape for name, shape in own.items() for key in STATE[1:]}
    expected |= dict.fromkeys((f"step:{name}" for name in own), ())
    for key, shape in saved.items():
        if key not in expected:
            raise CheckpointError(
                f"optimizer state {key!r} belongs to no parameter; use a checkpoint of this model"
            )
        if shape != expected[key]:
            raise CheckpointError(
                f"optimizer state {key!r} has shape {shape}, but {expected[key]} in this run; use "
                "a checkpoint of this model"
            )
        # A parameter without a gradient so far has no state at all.
        for other in (f"{kind}:{key.partition(':')[2]}" for kind in STATE):
            if other not in saved:
                raise CheckpointError(
                    f"optimizer state {other!r} is missing, but {key!r} exists; use an undamaged "
                    "checkpoint"
                )


def load_optimizer_state(
    optimizer: torch.optim.AdamW, named: dict[str, nn.Parameter], state: Mapping[str, Tensor]
) -> None:
    """Replace the state by what `optimizer_state` returned, one tensor at a time."""
    optimizer.state.clear()
    for name, parameter in named.items():
        if f"step:{name}" in state:
            optimizer.state[parameter] = {
                key: state[f"{key}:{name}"].to(parameter.device, copy=True) for key in STATE
            }
