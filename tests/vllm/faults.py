"""Worker parts with deliberate faults."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.config import RunConfig
from paceline.rollout.shards import Shard
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
        load, versions = follower._load, itertools.count()

        def corrupted(incoming: Iterator[tuple[str, Tensor]]) -> Any:
            return load(map(_wrong, incoming) if next(versions) == CORRUPTED_VERSION else incoming)

        follower._load = corrupted  # type: ignore[method-assign]
    return parts


def _wrong(named: tuple[str, Tensor]) -> tuple[str, Tensor]:
    name, tensor = named
    if name != SPLIT:
        return named
    if isinstance(tensor, Shard):
        for part in received_parts(tensor):
            part.copy_(5 * torch.randn_like(part))
        return named
    return name, 5 * torch.randn_like(tensor)  # not in place: it is in a file


def received_parts(tensor: Tensor) -> list[Tensor]:
    """Return what this rank received of a tensor."""
    if isinstance(tensor, Shard):
        return list(tensor._source._parts.values())  # type: ignore[attr-defined]
    return [tensor]
