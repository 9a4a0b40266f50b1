"""The layout of a run: its planned workers on the nodes of a cluster, checked for memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PretrainedConfig

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.model.loading import load_config
from paceline.training.backends import check_backend
from paceline.types import Role
from paceline.workers.automatic import Choice, choose
from paceline.workers.cluster import Node, PlannedWorker
from paceline.workers.fit import DoesNotFit, check_fit, phases_of
from paceline.workers.hardware import check_bfloat16
from paceline.workers.nearest import nearest_layout
from paceline.workers.phase_memory import Models, total
from paceline.workers.pools import find_nodes, plan_workers

TIPS = "train adapters ([train.lora]), add devices (cluster = 'ray'), or use a smaller model"


@dataclass(frozen=True, slots=True)
class Layout:
    config: RunConfig
    models: Models
    nodes: Sequence[Node]
    plans: Sequence[PlannedWorker]
    scarce: Sequence[str]  # warnings about memory that may run out
    choices: Sequence[Choice] = ()  # automatic settings, which `config` has set

    def actor_memory(self) -> dict[str, tuple[int, int]]:
        """Return the least and the most bytes that a rank of the actor needs in each phase."""
        plan = next(plan for plan in self.plans if Role.ACTOR in plan.roles)
        phases = phases_of(plan, self.nodes, self.config, self.models)
        sums = {phase.value: total(needs) for phase, needs in phases.items()}
        return {phase: (need.fixed, need.at_most) for phase, need in sums.items()}

    @property
    def warnings(self) -> list[str]:
        gpus = sum(node.gpus for node in self.nodes)
        used = len({device for plan in self.plans for device in plan.devices})
        if not gpus or used == gpus:
            return list(self.scarce)
        engines = any(Role.ROLLOUT in plan.roles for plan in self.plans)
        return [
            *self.scarce,
            f"{gpus - used} of {gpus} GPUs are not used: train.backend = 'fsdp' trains on all GPUs "
            "of a pool" + engines * ", and a separate pool for rollout has an engine on each",
        ]


async def plan_that_fits(
    config: RunConfig, model_path: str, roles: Sequence[Role] | None = None
) -> Layout:
    """Plan a run on the nodes that it would use. Raise ConfigError if it cannot fit.

    `roles`: those that are used; default: all of a training run.
    """
    nodes = await find_nodes(config)
    _check_gpus(config, sum(node.gpus for node in nodes))
    layout = plan_on(config, load_config(model_path), nodes, roles)
    check_bfloat16(layout.config)
    return layout


async def choose_settings(
    config: RunConfig, model_path: str, roles: Sequence[Role] | None = None
) -> RunConfig:
    """Set the automatic settings for workers of these roles, without a check of their memory."""
    models = Models.of(config, load_config(model_path))
    chosen, _ = choose(config, models, await find_nodes(config), roles)
    check_bfloat16(chosen)
    return chosen


def _check_gpus(config: RunConfig, gpus: int) -> None:
    """Raise ConfigError if the run needs more GPUs than there are, or a package for them."""
    wanted = config.placement.min_gpus
    if gpus < wanted:
        where = "this machine" if config.cluster == "local" else "the cluster"
        raise ConfigError(
            f"placement.min_gpus = {wanted}, but {where} has {gpus} GPUs. To run with what there "
            "is, remove placement.min_gpus; in settings of verl, remove trainer.n_gpus_per_node "
            "and rollout.n_gpus_per_node, or set both to 0"
        )
    if config.cluster == "local":  # the machines of a cluster may have other packages
        check_backend(config.train, gpus)


def plan_on(
    config: RunConfig,
    model: PretrainedConfig,
    nodes: Sequence[Node],
    roles: Sequence[Role] | None = None,
) -> Layout:
    """Plan a run on these nodes, with all automatic settings set.

    Raise DoesNotFit, with the nearest settings that fit.
    """
    models = Models.of(config, model)
    config, choices = choose(config, models, nodes, roles)
    plans = plan_workers(config, nodes, roles)
    try:
        scarce = check_fit(plans, nodes, config, models)
    except DoesNotFit as error:
        settings = nearest_layout(config, models, nodes, roles)
        advice = (
            f"the nearest layout that fits: {settings}"
            if settings
            else f"no layout of these devices fits: {TIPS}"
        )
        raise DoesNotFit(f"{error}; {advice}") from None
    return Layout(config, models, nodes, plans, scarce, choices)
