"""AdamW: parameter groups, gradient clipping, and its state as plain tensors."""

import torch
from torch import Tensor, nn

from paceline.errors import CheckpointError
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


def load_optimizer_state(
    optimizer: torch.optim.AdamW, named: dict[str, nn.Parameter], state: dict[str, Tensor]
) -> None:
    """Load what `optimizer_state` returned, all or nothing."""
    known = {f"{key}:{name}" for name in named for key in STATE}
    unknown = sorted(set(state) - known)
    if unknown:
        raise CheckpointError(
            f"optimizer state {unknown[0]!r} ({len(unknown)} in total) belongs to no parameter; "
            "use a checkpoint of this model"
        )
    fresh: dict[Tensor, dict[str, Tensor]] = {}
    for name, parameter in named.items():
        if f"step:{name}" not in state:
            continue
        entry = {key: state[f"{key}:{name}"].to(parameter.device, copy=True) for key in STATE}
        if entry["exp_avg"].shape != parameter.shape:
            raise CheckpointError(
                f"optimizer state of {name} has shape {tuple(entry['exp_avg'].shape)}, the "
                f"parameter has {tuple(parameter.shape)}; use a checkpoint of this model"
            )
        fresh[parameter] = entry
    optimizer.state.clear()
    optimizer.state.update(fresh)
