"""Worker parts with deliberate faults."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.config import RunConfig
from paceline.types import Role
from paceline.workers.build import build_parts

CORRUPTED_VERSION = 2
TIED = ("model.embed_tokens.weight", "lm_head.weight")  # one tensor under two names


def build_with_a_wrong_tensor(
    roles: Sequence[Role], config: RunConfig, model_path: str, threads: int
) -> Mapping[str, Any]:
    """Build an engine that corrupts one tensor of version 2 after all checks have passed."""
    parts = build_parts(roles, config, model_path, threads)
    if Role.ROLLOUT in parts:
        engine = parts[Role.ROLLOUT]._engine
        load = engine.load

        def corrupted(tensors: Any, version: int) -> None:
            named = dict(tensors)
            if version == CORRUPTED_VERSION:
                wrong = 5 * torch.randn_like(named["model.embed_tokens.weight"])
                named.update({name: wrong for name in TIED if name in named})
            load(named, version)

        engine.load = corrupted
    return parts
