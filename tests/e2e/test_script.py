"""Roles called from a plain script: a non-blocking call returns a future."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.config import load_config
from paceline.errors import DataError
from paceline.script import Workers
from paceline.types import Sampling
from tests.e2e.test_roles import batch
from tests.models import random_model, random_reward_model
from tests.processes import children, worker_pids
from tests.small_runs import SEPARATE, SMALL, config

SPLIT = ["algorithm.name=ppo", "placement.critic=critic_pool"]


@contextmanager
def suspended(pids: dict[str, int]) -> Iterator[None]:
    for pid in pids.values():
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids.values():
            os.kill(pid, signal.SIGCONT)


def test_call_returns_future_before_it_is_done_when_it_does_not_block(tmp_path: Path) -> None:
    chosen = config(random_model(tmp_path / "model"), tmp_path / "run", *SPLIT)
    with Workers(chosen, tmp_path / "logs") as workers:
        pids = worker_pids(tmp_path)
        assert set(pids) == {"main", "critic_pool"}
        with suspended(pids):
            actor = workers.actor.update(batch(), 0, blocking=False)
            critic = workers.critic.values(batch(), blocking=False)
            assert not actor.done() and not critic.done()
        assert "train/loss" in actor.get(240) and critic.get(240).shape == batch().tokens.shape
        assert "train/loss" in workers.actor.update(batch(), 1)
        with pytest.raises(DataError, match="has no advantages"):
            workers.actor.update(replace(batch(), advantages=None), 2, blocking=False).get(60)
        with pytest.raises(
            AttributeError, match="this recipe has no 'ref'; it has actor, rollout, critic"
        ):
            workers.ref  # noqa: B018
    assert not children()


FOUR_MODELS = ["algorithm.name=ppo", "algorithm.kl_coef=0.1"]
PLACEMENTS = {
    "hybrid": [],
    "separate": SEPARATE,
    "split": ["placement.critic=critic_pool"],
    "ranks": ["train.backend=fsdp", "placement.train_ranks=2"],
    "separate ranks": ["train.backend=fsdp", "placement.train_ranks=2", *SEPARATE],
}


QUICK = {"hybrid", "ranks"}


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PLACEMENTS],
)
def test_every_verb_answers_in_every_placement(name: str, tmp_path: Path) -> None:
    model = random_model(tmp_path / "model")
    reward = f"reward.model={random_reward_model(tmp_path / 'reward')}"
    settings = [*FOUR_MODELS, reward, *PLACEMENTS[name], "train.learning_rate=1e-2"]
    small = [setting for setting in SMALL if not setting.startswith("reward.")]
    chosen = load_config(None, [f"model={model}", f"run_dir={tmp_path}", *small, *settings])
    prompts, greedy = [(5, 9, 13), (2, 7), (5, 9, 13)], Sampling(4, temperature=0.0)
    with Workers(chosen, tmp_path) as workers:
        workers.sync_weights(0)
        before = workers.rollout.generate(prompts, greedy)
        assert [len(completion.tokens) for completion in before] == [4, 4, 4]
        assert before[0].tokens.tolist() == before[2].tokens.tolist()
        pending = workers.rollout.generate(prompts, blocking=False)
        assert len(pending.get(60)) == 3
        logprobs = workers.actor.logprobs(batch())
        reference = workers.ref.logprobs(batch())
        np.testing.assert_allclose(logprobs, reference, atol=1e-5)
        assert workers.critic.values(batch()).shape == logprobs.shape
        assert len(workers.reward.score("say 1", None, ["1", "2"])) == 2
        workers.actor.save(str(tmp_path / "saved"))
        trained = replace(batch(), ref_logprobs=reference)
        assert "train/loss" in workers.actor.update(trained, 0)
        assert not np.allclose(workers.actor.logprobs(batch()), logprobs, atol=1e-5)
        workers.sync_weights(1)
        after = workers.rollout.generate(prompts, greedy)
        assert set(after[0].versions.tolist()) == {1}
        assert not np.allclose(after[0].logprobs, before[0].logprobs, atol=1e-5)
        workers.actor.load(str(tmp_path / "saved"))
        workers.sync_weights(2)
        restored = workers.rollout.generate(prompts, greedy)
        assert restored[0].tokens.tolist() == before[0].tokens.tolist()
        np.testing.assert_allclose(restored[0].logprobs, before[0].logprobs, atol=1e-5)
    assert not children()
