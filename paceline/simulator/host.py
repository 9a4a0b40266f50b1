"""Measurement of the controller: its seconds per completion, without devices.

The controller is one thread. Before the queue, it admits prompts, exchanges messages with engines,
turns tokens into text and scores them, while devices work. With a batch, it assembles, measures and
records the completions, while the trainer waits. Reward functions of the user run elsewhere and are
not part of it.
"""

import asyncio
import pickle
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config import RunConfig
from paceline.data.chat import text_decoder
from paceline.group_metrics import measure
from paceline.inputs import Inputs
from paceline.observe.recorder import Recorder
from paceline.observe.samples import Samples
from paceline.reward.lookup import builtin
from paceline.reward.reward import NoReward, Reward, open_reward
from paceline.schedule import ScheduleSettings
from paceline.simulator.costs import CostModel
from paceline.simulator.lengths import read_distribution
from paceline.simulator.simulation import Scenario, simulate
from paceline.training.assembly import assemble
from paceline.types import Completion, Finish, Group, Request, Sampling, Trajectory, Turn

LOOP_STEPS = 4  # of the loop without devices
MOST_COMPLETIONS = 1024  # that are handled in a measurement
# A step must take some time to be counted; everything else takes none.
NO_COSTS = CostModel.model_validate(
    {name: 0.0 for name in CostModel.model_fields if name.endswith("_s")}
    | {"train_step_s": 1e-3, "environment_s": "fixed:0"}
)


async def host_costs(config: RunConfig, inputs: Inputs) -> dict[str, float]:
    """Return `host_completion_s` and `host_trained_s` of this recipe."""
    count = max(1, min(config.groups_per_step, MOST_COMPLETIONS // config.group_size))
    loop_s = await asyncio.to_thread(_loop_s, count, config.group_size)
    for _ in range(2):  # what is loaded on first use does not count
        groups, handling_s = await _handled(config, inputs, count)
    decode, size = text_decoder(inputs.tokenizer), count * config.group_size
    recording_s = min(_recording_s(groups, config, decode) for _ in range(3))
    return {
        "host_completion_s": (loop_s + handling_s) / size,
        "host_trained_s": recording_s / size,
    }


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


async def _handled(config: RunConfig, inputs: Inputs, count: int) -> tuple[list[Group], float]:
    """Return groups that were received, decoded and scored, and the seconds of that."""
    decode, length = text_decoder(inputs.tokenizer), max(1, config.rollout.max_response_length // 2)
    reward, groups = await _reward(config), list[Group]()
    prompts, sampling = [inputs.source[seq] for seq in range(count)], Sampling(length)
    each = range(config.group_size)
    random, vocabulary = np.random.default_rng(0), len(inputs.tokenizer)
    made = [[_completion(random, length, vocabulary) for _ in each] for _ in prompts]
    begun = time.perf_counter()
    received = _sent(made)
    for seq, (prompt, completions) in enumerate(zip(prompts, received, strict=True)):
        _sent([Request("", prompt.tokens, seq, sampling) for _ in each])
        trajectories = [
            Trajectory((Turn(prompt.tokens, each),), decode(each.tokens.tolist()))
            for each in completions
        ]
        scores = await reward.score(prompt, trajectories)
        assert len(scores) == len(trajectories)
        scored = tuple(replace(each, reward=0.0) for each in trajectories)
        groups.append(Group(seq, prompt, scored, 0, 0))
    return groups, time.perf_counter() - begun


def _completion(random: np.random.Generator, length: int, vocabulary: int) -> Completion:
    tokens = random.integers(0, vocabulary, length).astype(np.int32)
    return Completion(tokens, np.zeros(length, np.float32), np.zeros(length, np.int32), Finish.STOP)


def _sent(message: Any) -> Any:
    """Return a message as the other process gets it. Both processes handle it in turn."""
    return pickle.loads(pickle.dumps(message))


def _recording_s(
    groups: list[Group], config: RunConfig, decode: Callable[[list[int]], str]
) -> float:
    """Return the seconds to assemble, measure and record a batch."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        recorder = Recorder(run_dir, 0, Samples(run_dir, config.save_samples, 0, decode))
        begun = time.perf_counter()
        for group in groups:
            recorder.group_seen("generated", group)
        recorder.step_done(1, measure(groups, assemble(groups)), groups)
        seconds = time.perf_counter() - begun
        recorder.close()
    return seconds


async def _reward(config: RunConfig) -> Reward:
    """Return the reward if it is built in; the user's functions do not run in the controller."""
    names = config.reward.names or (config.data.task or "",)
    if all(builtin(name) for name in names) and not config.reward.model:
        return await open_reward(config.reward, config.data.task)
    return NoReward()
