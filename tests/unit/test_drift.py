"""Warnings about spikes and about a policy that drifts without learning."""

import math

import pytest

from paceline.observe.drift import ENTROPY, LENGTH, REWARD, DriftMonitor


def warnings(caplog: pytest.LogCaptureFixture, *steps: dict[str, float]) -> list[str]:
    monitor = DriftMonitor()
    for number, metrics in enumerate(steps):
        monitor.check(metrics, number)
    return [record.getMessage() for record in caplog.records]


def noisy(level: float, number: int) -> float:
    return level * (1 + 0.3 * math.sin(number))


@pytest.mark.parametrize("name", ["train/grad_norm", "train/loss"])
def test_spike_is_reported_once_with_usual_value(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    steps = [{name: noisy(0.5, n)} for n in range(80)]
    steps[40] = steps[41] = {name: 40.0}
    steps[75] = {name: -40.0}  # the second one
    found = warnings(caplog, *steps)
    assert len(found) == 1 and found[0].startswith(f"step 41: {name} = 40, where 0.")


def test_noise_is_not_spike(caplog: pytest.LogCaptureFixture) -> None:
    steps = [{"train/grad_norm": noisy(0.2, n), "train/loss": noisy(1e-3, n)} for n in range(80)]
    steps[40] = {"train/grad_norm": 0.9, "train/loss": 0.5}
    steps[3] = {"train/grad_norm": 90.0}  # the first steps are not usual yet
    assert warnings(caplog, *steps) == []


def test_spike_is_reported_after_skipped_updates(caplog: pytest.LogCaptureFixture) -> None:
    steps = [{"train/grad_norm": noisy(0.5, n)} for n in range(80)]
    for number in range(30, 52):
        steps[number] = {"train/grad_norm": math.nan}
    steps[55] = {"train/grad_norm": 40.0}
    (found,) = warnings(caplog, *steps)
    assert found.startswith("step 56: train/grad_norm = 40, where 0.")


@pytest.mark.parametrize(
    ("name", "after", "meaning"),
    [
        (ENTROPY, 0.1, "the policy becomes deterministic"),
        (ENTROPY, 9.0, "the policy becomes random"),
        (LENGTH, 0.1, "completions become short"),
        (LENGTH, 9.0, "completions become long"),
    ],
)
def test_drift_is_reported_once_unless_reward_rises(
    name: str, after: float, meaning: str, caplog: pytest.LogCaptureFixture
) -> None:
    steps = [{name: 1.0 if n < 30 else after, REWARD: noisy(0.5, n)} for n in range(100)]
    found = warnings(caplog, *steps)
    assert len(found) == 1 and meaning in found[0] and f"{name} 1 ->" in found[0]
    caplog.clear()
    learns = [metrics | {REWARD: 0.5 + n / 100} for n, metrics in enumerate(steps)]
    assert warnings(caplog, *learns) == []
