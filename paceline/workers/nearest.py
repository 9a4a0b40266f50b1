"""Search for the nearest layout that fits: the fewest changed settings, least intrusive first."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.model.shape import model_shape
from paceline.types import Role
from paceline.workers.cluster import Node
from paceline.workers.fit import check_fit
from paceline.workers.phase_memory import Models
from paceline.workers.pools import plan_workers

SIZES = (1, 2, 4, 8)  # of tensor and pipeline parallelism
TRIES = 3000

Settings = Mapping[str, Any]
Choice = tuple[int, Settings]  # cost of a change, and the settings it makes


def nearest_layout(
    config: RunConfig,
    models: Models,
    nodes: Sequence[Node],
    roles: Sequence[Role] | None = None,
) -> str | None:
    """Return the settings of the nearest layout that fits with full micro-batches, as key=value.

    It also has room for full KV caches, if there is such a layout. None: nothing fits, or the nodes
    have no GPUs, where layouts share one memory.
    """
    if not any(node.gpus for node in nodes):
        return None
    axes = _axes(config, models, sum(node.gpus for node in nodes))
    if roles and Role.ROLLOUT not in roles:  # only settings that such a run has
        axes = [[c for c in axis if all(key.startswith("train.") for key in c[1])] for axis in axes]
    candidates = sorted(itertools.product(*axes), key=lambda each: sum(cost for cost, _ in each))
    nearest: Settings | None = None
    for candidate in candidates[:TRIES]:
        changes = _merged(config, candidate)
        if not _fits(config, changes, models, nodes, roles, full_cache=False):
            continue
        if _fits(config, changes, models, nodes, roles, full_cache=True):
            return _as_text(config, nodes, changes)
        nearest = changes if nearest is None else nearest
    return None if nearest is None else _as_text(config, nodes, nearest)


def _as_text(config: RunConfig, nodes: Sequence[Node], changes: Settings) -> str:
    if len(nodes) > 1 and config.cluster == "local":
        changes = {**changes, "cluster": "ray"}
    return " ".join(f"{key}={_written(value)}" for key, value in changes.items())


def _merged(config: RunConfig, candidate: Sequence[Choice]) -> Settings:
    """Return all changes of a candidate; GPUs for engines become a number of engines."""
    changes = {key: value for _, settings in candidate for key, value in settings.items()}
    if engines := changes.pop("placement.rollout_workers", None):
        ranks = changes.get("rollout.tensor_parallel", config.rollout.tensor_parallel)
        ranks *= changes.get("rollout.pipeline_parallel", config.rollout.pipeline_parallel)
        if config.placement.rollout_workers is not None:
            changes["placement.rollout_workers"] = max(1, engines // ranks)
    return changes


def _fits(
    config: RunConfig,
    changes: Settings,
    models: Models,
    nodes: Sequence[Node],
    roles: Sequence[Role] | None,
    full_cache: bool,
) -> bool:
    values = config.model_dump()
    for key, value in changes.items():
        section, name = key.split(".")
        values[section][name] = value
    try:
        changed = RunConfig.model_validate(values)
        plans = plan_workers(changed, nodes, roles)
        return not check_fit(plans, nodes, changed, models, full_cache)
    except (ConfigError, ValidationError):
        return False


def _axes(config: RunConfig, models: Models, gpus: int) -> list[list[Choice]]:
    """Return the choices along each axis. The first, at no cost, changes nothing."""
    train, shape = config.train, model_shape(models.policy)
    divisors = [size for size in SIZES if shape.kv_heads % size == 0]
    stages = [size for size in SIZES if shape.layers % size == 0]
    return [
        list(_switch("train.gradient_checkpointing", train.gradient_checkpointing)),
        list(_switch("train.offload", train.offload)),
        list(_backends(train.backend)),
        list(_engines(config, divisors, stages)),
        list(_other("train.tensor_parallel", train.tensor_parallel, divisors, 3)),
        list(_other("train.pipeline_parallel", train.pipeline_parallel, stages, 3)),
        list(_pools(config, gpus)),
    ]


def _switch(name: str, on: bool) -> Iterator[Choice]:
    yield 0, {}
    if not on:
        yield 1, {name: True}


def _other(name: str, now: int, values: Sequence[int], cost: int) -> Iterator[Choice]:
    yield 0, {}
    yield from ((cost, {name: value}) for value in values if value != now)


def _backends(now: str) -> Iterator[Choice]:
    yield 0, {}
    yield from (
        (2 if name == "fsdp" else 4, {"train.backend": name})
        for name in ("fsdp", "megatron")
        if name != now
    )


def _engines(config: RunConfig, sizes: Sequence[int], stages: Sequence[int]) -> Iterator[Choice]:
    """Yield splits of an engine; stages only if no layer can be split further."""
    yield 0, {}
    vllm = {} if config.rollout.engine == "vllm" else {"rollout.engine": "vllm"}
    for size in sizes:
        if size != config.rollout.tensor_parallel:
            yield 2 + len(vllm), {**vllm, "rollout.tensor_parallel": size}
    tensor = {"rollout.tensor_parallel": sizes[-1]} if sizes[-1] != 1 else {}
    for size in stages[1:]:
        if size != config.rollout.pipeline_parallel:
            yield 4 + len(vllm), {**vllm, **tensor, "rollout.pipeline_parallel": size}


def _pools(config: RunConfig, gpus: int) -> Iterator[Choice]:
    """Yield shared and separate pools of actor and engines, with other numbers of ranks.

    Settings cannot be unset on a command line, so counts that are set get another value.
    """
    placement = config.placement
    shared = placement.shared(Role.ACTOR, Role.ROLLOUT)
    yield 0, {}
    together: dict[str, Any] = {} if shared else {"placement.rollout": placement.actor}
    together |= {} if placement.train_ranks is None else {"placement.train_ranks": gpus}
    together |= {} if placement.rollout_workers is None else {"placement.rollout_workers": 1}
    yield (1 if shared else 3), together
    apart = {"placement.actor": "train", "placement.rollout": "rollout"} if shared else {}
    for engines in {gpus // part for part in (2, 4, 8) if gpus >= part}:
        ranks = {"placement.train_ranks": gpus - engines}
        yield (4 if shared else 2), {**apart, **ranks, "placement.rollout_workers": engines}


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
