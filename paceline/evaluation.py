"""Evaluation of a model without training: every row of the data once, scored as in training.

Waits for: the engine and the scorer, for as many groups at a time as fill the engine.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from typing import Any

from paceline.algo.settings import AlgorithmSettings
from paceline.config import RunConfig
from paceline.data.held_out import EvaluationSettings
from paceline.errors import ConfigError, RewardError, RolloutError, first_error
from paceline.generation import open_agent, open_generation, open_scorer, start_agent
from paceline.held_out import Failures, score
from paceline.inputs import load_inputs
from paceline.placement import PlacementSettings
from paceline.reward.reward import Rewards
from paceline.rollout.environment import MakeEnvironment
from paceline.schedule import ScheduleSettings
from paceline.settings import open_settings
from paceline.suspend import ignore_suspended_time
from paceline.temporary import TemporaryFolder
from paceline.types import Group, Role
from paceline.watchdog import Watchdog
from paceline.workers.automatic import GPU_SLOTS
from paceline.workers.layout import choose_settings


def for_evaluation(config: RunConfig, samples: int) -> RunConfig:
    """Return a configuration with the same model, data and reward, for this machine's engines.

    One completion per prompt is greedy unless rollout.top_p or rollout.top_k asks for sampling.
    """
    if not isinstance(samples, int) or samples < 1:
        raise ConfigError(f"samples = {samples!r}; expected a whole number of at least 1")
    slots = GPU_SLOTS if "rollout.slots" in open_settings(config) else config.rollout.slots
    greedy = samples == 1 and config.rollout.top_p == 1 and config.rollout.top_k == 0
    temperature = 0.0 if greedy else config.rollout.temperature
    changes: dict[str, Any] = {
        "group_size": samples,
        "groups_per_step": max(1, slots // samples) + 1,  # in flight per engine
        "cluster": "local",
        "algorithm": AlgorithmSettings(),
        "evaluation": EvaluationSettings(solved_at=config.evaluation.solved_at),
        "schedule": ScheduleSettings(),
        "placement": PlacementSettings(threads=config.placement.threads),
        "rollout": config.rollout.model_copy(update={"temperature": temperature}),
    }
    return config.model_copy(update=changes)


async def evaluate(
    config: RunConfig,
    progress: Callable[[int, int], None] | None = None,
    reward: Rewards | None = None,
    environment: MakeEnvironment | None = None,
    rows: Iterable[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return the mean reward over all rows and other statistics.

    `progress(groups done, all groups)` is called after each group. `reward`, `environment` and
    `rows` replace those of the settings.
    """
    ignore_suspended_time(asyncio.get_running_loop())
    inputs = load_inputs(config, rows)
    agent = open_agent(config, inputs, environment)
    model_scores = config.reward.model and reward is None
    roles = [Role.ROLLOUT, Role.REWARD] if model_scores else [Role.ROLLOUT]
    config = await choose_settings(config, inputs.model_path, roles)
    async with AsyncExitStack() as stack:
        await start_agent(stack, config, agent)
        scorer = await open_scorer(stack, config, inputs, reward, agent)
        logs = stack.enter_context(TemporaryFolder("paceline-logs-"))
        generation = await open_generation(stack, config, roles, inputs, agent, scorer, logs)
        stack.enter_context(Watchdog(generation.living_workers, config.stall_timeout_s))
        engines = len(generation.workers[Role.ROLLOUT])
        room = asyncio.Semaphore(engines * config.groups_per_step)
        failures = Failures(config.rollout.max_failed_groups)
        groups: list[Group] = []
        done = 0  # with those that failed

        async def one(seq: int) -> None:
            nonlocal done
            async with room:
                try:
                    groups.append(await generation.rollouter.run(seq, inputs.source[seq]))
                except (RewardError, RolloutError) as error:
                    failures.leave_out(seq, error)
            done += 1
            if progress:
                progress(done, len(inputs.source))

        try:
            async with asyncio.TaskGroup() as tasks:
                for seq in range(len(inputs.source)):
                    tasks.create_task(one(seq))
        except BaseExceptionGroup as failed:
            raise first_error(failed) from None
        groups.sort(key=lambda group: group.seq)
        return score(groups, config.evaluation.solved_at, len(inputs.source))
