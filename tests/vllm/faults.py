"""Worker parts with deliberate faults."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.config import RunConfig
from paceline.rollout.tensor_parallel import Follower
from paceline.types import Role
from paceline.workers.build import build_parts

CORRUPTED_VERSION = 2
TIED = ("model.embed_tokens.weight", "lm_head.weight")  # one tensor under two names
SPLIT = "model.layers.0.mlp.down_proj.weight"  # both ranks have a half of it


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


def build_with_a_wrong_shard(
    roles: Sequence[Role], config: RunConfig, model_path: str, threads: int
) -> Mapping[str, Any]:
    """Build an engine whose second rank gets a wrong shard of one tensor of version 2."""
    parts = build_parts(roles, config, model_path, threads)
    if isinstance(follower := parts.get(Role.ROLLOUT), Follower):
        load, versions = follower._own.load, itertools.count()

        def corrupted(tensors: Any) -> None:
            wrong = next(versions) == CORRUPTED_VERSION
            load(
                (name, 5 * torch.randn_like(tensor) if wrong and name == SPLIT else tensor)
                for name, tensor in tensors
            )

        follower._own.load = corrupted  # type: ignore[method-assign]
    return parts
