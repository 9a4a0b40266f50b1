"""Measurement of the controller: its seconds per completion, without devices.

The controller is one thread: it admits prompts, turns tokens into text, scores, queues and builds
batches. Reward functions of the user run elsewhere and are not part of it.
"""

import asyncio
import time
from dataclasses import replace

import numpy as np

from paceline.config import RunConfig
from paceline.data.chat import text_decoder
from paceline.inputs import Inputs
from paceline.reward.lookup import builtin
from paceline.reward.reward import NoReward, Reward, open_reward
from paceline.schedule import ScheduleSettings
from paceline.simulator.costs import CostModel
from paceline.simulator.lengths import read_distribution
from paceline.simulator.simulation import Scenario, simulate
from paceline.training.assembly import assemble
from paceline.types import Completion, Finish, Group, Trajectory, Turn

LOOP_STEPS = 4  # of the loop without devices
MOST_COMPLETIONS = 1024  # that are handled in a measurement
# A step must take some time to be counted; everything else takes none.
NO_COSTS = CostModel.model_validate(
    {name: 0.0 for name in CostModel.model_fields if name.endswith("_s")}
    | {"train_step_s": 1e-3, "environment_s": "fixed:0"}
)


async def host_completion_s(config: RunConfig, inputs: Inputs) -> float:
    """Return the seconds of the controller per completion of this recipe."""
    groups = max(1, min(config.groups_per_step, MOST_COMPLETIONS // config.group_size))
    loop_s = await asyncio.to_thread(_loop_s, groups, config.group_size)
    return (loop_s + await _handling_s(config, inputs, groups)) / (groups * config.group_size)


def _loop_s(groups: int, group_size: int) -> float:
    """Return the seconds of loop, rollouter and queue for a batch: the loop with free devices."""
    scenario = Scenario(
        NO_COSTS,
        read_distribution("fixed:1"),
        ScheduleSettings(),
        steps=LOOP_STEPS,
        groups_per_step=groups,
        group_size=group_size,
        shared=True,
        slots=groups * group_size,
    )
    begun = time.perf_counter()
    simulate(scenario)
    return (time.perf_counter() - begun) / LOOP_STEPS


async def _handling_s(config: RunConfig, inputs: Inputs, count: int) -> float:
    """Return the seconds to decode, score and assemble a batch of this many groups."""
    decode, random = text_decoder(inputs.tokenizer), np.random.default_rng(0)
    length = max(1, config.rollout.max_response_length // 2)
    vocabulary = len(inputs.tokenizer)
    completions = [
        Completion(
            random.integers(0, vocabulary, length).astype(np.int32),
            np.zeros(length, np.float32),
            np.zeros(length, np.int32),
            Finish.STOP,
        )
        for _ in range(config.group_size)
    ]
    reward, groups = await _reward(config), list[Group]()
    begun = time.perf_counter()
    for seq in range(count):
        prompt = inputs.source[seq]
        made = [
            Trajectory((Turn(prompt.tokens, each),), decode(each.tokens.tolist()))
            for each in completions
        ]
        scores = await reward.score(prompt, made)
        assert len(scores) == len(made)
        scored = tuple(replace(each, reward=0.0) for each in made)
        groups.append(Group(seq, prompt, scored, 0, 0))
    assemble(groups)
    return time.perf_counter() - begun


async def _reward(config: RunConfig) -> Reward:
    """Return the reward if it is built in; the user's functions do not run in the controller."""
    names = config.reward.names or (config.data.task or "",)
    if all(builtin(name) for name in names) and not config.reward.model:
        return await open_reward(config.reward, config.data.task)
    return NoReward()
