"""A model on its data without training: every row once, scored as a run would score it.

Waits for: the engine and the reward, for as many groups at a time as fill the engine.
"""

import asyncio
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np

from paceline.algo.settings import AlgorithmSettings
from paceline.config import RunConfig
from paceline.errors import first_error
from paceline.inputs import load_inputs
from paceline.placement import PlacementSettings
from paceline.reward.model import ModelReward
from paceline.rollout.environment import open_environment
from paceline.run import make_fleet, make_rollouter, open_scorer
from paceline.schedule import ScheduleSettings
from paceline.suspend import ignore_suspended_time
from paceline.sync.transport import InPlace
from paceline.synchronizer import ParameterSynchronizer
from paceline.types import Finish, Group, Role
from paceline.workers.pools import open_workers


def for_evaluation(config: RunConfig, attempts: int) -> RunConfig:
    """Return a configuration with the same model, data and reward in one process without training.

    One completion per prompt is greedy unless rollout.top_p or rollout.top_k asks for sampling.
    """
    greedy = attempts == 1 and config.rollout.top_p == 1 and config.rollout.top_k == 0
    temperature = 0.0 if greedy else config.rollout.temperature
    changed: dict[str, Any] = {
        "group_size": attempts,
        "cluster": "local",
        "algorithm": AlgorithmSettings(),
        "schedule": ScheduleSettings(),
    }
    parts = {
        "placement": PlacementSettings(threads=config.placement.threads),
        "rollout": config.rollout.model_copy(update={"temperature": temperature}),
        "train": config.train.model_copy(
            update={"backend": "single", "lora": None, "tensor_parallel": 1, "pipeline_parallel": 1}
        ),
        "groups_per_step": max(1, config.rollout.slots // attempts) + 1,  # under way at a time
    }
    return config.model_copy(update=changed | parts)


async def evaluate(
    config: RunConfig, done: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """The mean reward of all rows and what else there is to say. `done(groups, of)` is told as it goes."""
    ignore_suspended_time(asyncio.get_running_loop())
    inputs = load_inputs(config)
    agent = open_environment(config.rollout.environment, inputs.tokenizer)
    async with AsyncExitStack() as stack:
        scorer = await open_scorer(stack, config, inputs)
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-")))
        cluster, plans, workers = await open_workers(stack, config, inputs.model_path, logs)
        fleet = make_fleet(config, cluster, plans, workers[Role.ROLLOUT])
        stack.push_async_callback(fleet.close)
        scorer = scorer or ModelReward(
            workers[Role.REWARD][0], config.data.prompt_key, config.data.system
        )
        rollouter = make_rollouter(config, inputs, fleet, agent, scorer)
        await ParameterSynchronizer(
            InPlace(), fleet, rollouter, config.schedule.on_sync, config.sync
        ).sync_weights(0)
        room = asyncio.Semaphore(config.groups_per_step)
        groups: list[Group] = []

        async def one(seq: int) -> None:
            async with room:
                groups.append(await rollouter.run(seq, inputs.source[seq]))
            if done:
                done(len(groups), len(inputs.source))

        try:
            async with asyncio.TaskGroup() as tasks:
                for seq in range(len(inputs.source)):
                    tasks.create_task(one(seq))
        except BaseExceptionGroup as failed:
            raise first_error(failed) from None
        return figures(sorted(groups, key=lambda group: group.seq))


def figures(groups: list[Group]) -> dict[str, Any]:
    attempts = [trajectory for group in groups for trajectory in group.trajectories]
    rewards = [[trajectory.reward or 0.0 for trajectory in group.trajectories] for group in groups]
    details = {name for attempt in attempts for name in attempt.details}
    return {
        "prompts": len(groups),
        "attempts": len(attempts),
        "reward": float(np.mean([np.mean(row) for row in rewards])),
        "reward_max": float(
            np.mean([max(row) for row in rewards])
        ),  # of the attempts at each prompt
        **{
            f"reward_component/{name}": float(
                np.mean([a.details[name] for a in attempts if name in a.details])
            )
            for name in sorted(details)
        },
        "tokens_mean": float(np.mean([attempt.num_tokens for attempt in attempts])),
        "truncated_fraction": float(
            np.mean([attempt.turns[-1].completion.finish is Finish.LENGTH for attempt in attempts])
        ),
    }
