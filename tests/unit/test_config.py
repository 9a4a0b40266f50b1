"""Rules that concern several sections of a configuration."""

import pytest

from paceline.config import check_trainable, load_config
from paceline.errors import ConfigError

TWO_STEPS = ["schedule.max_staleness=1", "schedule.sync_every=2"]


def test_sync_every_is_rejected_when_engine_shares_trainer_weights() -> None:
    with pytest.raises(ConfigError) as rejected:
        load_config(None, TWO_STEPS)
    assert "schedule.sync_every = 2" in str(rejected.value)
    assert "placement.rollout = placement.actor = 'main'" in str(rejected.value)


@pytest.mark.parametrize(
    "setting", ["placement.overlap=true", "placement.rollout=other", "train.lora.rank=4"]
)
def test_sync_every_is_accepted_when_engine_has_separate_weights(setting: str) -> None:
    assert load_config(None, [*TWO_STEPS, setting]).schedule.sync_every == 2


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("rollout.top_p=0.9", "rollout.top_p = 0.9"),
        ("rollout.top_k=5", "rollout.top_k = 5"),
        ("rollout.temperature=0", "rollout.temperature = 0"),
    ],
)
def test_sampling_filter_is_rejected_for_training_only(setting: str, named: str) -> None:
    config = load_config(None, [setting])
    with pytest.raises(ConfigError, match=named):
        check_trainable(config)
