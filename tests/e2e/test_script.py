"""Roles called from a plain script: a non-blocking call returns a future."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import DataError
from paceline.script import Workers
from tests.e2e.test_roles import batch
from tests.e2e.test_runs import config
from tests.models import random_model
from tests.processes import children

SPLIT = ["algorithm.name=ppo", "placement.critic=critic_pool"]


def test_actor_and_critic_run_concurrently_when_calls_do_not_block(tmp_path: Path) -> None:
    chosen = config(random_model(tmp_path / "model"), tmp_path / "run", *SPLIT)
    with Workers(chosen, tmp_path / "logs") as workers:
        start = time.monotonic()
        actor = workers.actor.update(batch(), 0, blocking=False)
        critic = workers.critic.values(batch(), blocking=False)
        assert time.monotonic() - start < 0.1 or not (actor.done() and critic.done())
        assert "train/loss" in actor.get(60) and critic.get(60).shape == batch().tokens.shape
        assert "train/loss" in workers.actor.update(batch(), 1)
        with pytest.raises(DataError, match="has no advantages"):
            workers.actor.update(replace(batch(), advantages=None), 2, blocking=False).get(60)
        with pytest.raises(
            AttributeError, match="this recipe has no 'ref'; it has actor, rollout, critic"
        ):
            workers.ref  # noqa: B018
    assert not children()
