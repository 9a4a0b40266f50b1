"""The prediction of a planned run, and the run's comparison with it.

`paceline plan --probe` writes the file; a run whose setting `prediction` names it compares its
speed and says which part differs if the speed is off by more than 20 %.
"""

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from paceline.errors import ConfigError
from paceline.settings import Settings

log = logging.getLogger(__name__)

OFF = 0.2  # relative error of the speed that is reported
PART = 1.1  # ratio of a part to its prediction from which it is a reason
SHARE = 0.05  # of the device time from which a part that was not predicted is a reason
ENOUGH_STEPS = 10  # after the first ones, before the comparison is logged
# Parts of the device-time ledger that a simulation does not have.
UNPREDICTED = {
    "waiting for rewards": ("wait_reward", "reward"),
    "evaluation": ("evaluation", "wait_evaluation"),
    "checkpoints": ("checkpoint", "wait_checkpoint"),
    "tokens that were not trained on": ("wasted",),
    "waiting for replacements of rollout workers": ("wait_restart",),
}
TRAINED = ("rollout/tokens", "rollout/trajectories")
GENERATED = ("generation", "underfilled", "prefill", "evaluation", "wasted")


class Prediction(Settings):
    """The predicted run. Seconds are those of a step."""

    mode: str
    settings: tuple[str, ...]
    """Settings that change the recipe to this mode."""
    lengths: str
    """Distribution of the lengths that was assumed."""
    max_staleness: int
    steps_per_s: float = Field(gt=0)
    limit_steps_per_s: float
    staleness_mean: float
    completions: int = Field(gt=0)
    """Completions per step."""
    completion_tokens: float = Field(gt=0)
    """Mean tokens of a completion."""
    prompt_tokens: float = Field(ge=0)
    """Mean tokens of a prompt."""
    generate_s: float = Field(ge=0)
    """Seconds of decode and prefill, of all devices."""
    train_s: float = Field(ge=0)
    sync_s: float = Field(ge=0)


def read_prediction(path: Path) -> Prediction:
    advice = "`paceline plan RECIPE --probe` writes such a file; remove the setting to do without"
    try:
        return Prediction.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"prediction = {str(path)!r} cannot be read: {error.strerror}; {advice}"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(
            f"prediction = {str(path)!r}: {where}: {first['msg']}; {advice}"
        ) from None


def write_prediction(path: Path, prediction: Prediction) -> None:
    try:
        path.write_text(json.dumps(prediction.model_dump(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


class PredictionCheck:
    """Compares the steps of a run with their prediction, except the first ones.

    The pipeline fills in the first steps, and kernels are compiled.
    """

    def __init__(
        self,
        prediction: Prediction,
        max_staleness: int,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._prediction, self._max_staleness, self._now = prediction, max_staleness, now
        self._skip = 2 + max_staleness
        self._since = 0.0
        self._steps = 0
        self._sums: Counter[str] = Counter()
        self._wall = 0.0

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step; after enough of them, log the comparison once."""
        now = self._now()
        if self._skip:
            self._skip, self._since = self._skip - 1, now
            return
        self._steps += 1
        self._wall = now - self._since
        self._sums.update({name: value for name, value in metrics.items() if _summed(name)})
        if self._steps == ENOUGH_STEPS:
            found = self.summary()
            assert found is not None
            level = logging.WARNING if found["off"] else logging.INFO
            log.log(level, "after %d steps: %s", ENOUGH_STEPS, found["text"])

    def summary(self) -> dict[str, Any] | None:
        """Return the comparison, or None if the run has too few steps."""
        if not self._steps or self._wall <= 0:
            return None
        predicted = self._prediction.steps_per_s
        measured = self._steps / self._wall
        error = measured / predicted - 1
        off = abs(error) > OFF
        reasons = list(self._reasons(error < 0)) if off else []
        text = f"{measured:.3g} steps/s, predicted {predicted:.3g} ({error:+.0%})"
        if off:
            text += ": " + ("; ".join(reasons) or "no single part explains it, see device time")
        return {
            "mode": self._prediction.mode,
            "predicted_steps_per_s": predicted,
            "measured_steps_per_s": measured,
            "error": error,
            "off": off,
            "reasons": reasons,
            "text": text,
        }

    def _reasons(self, slower: bool) -> Iterator[str]:
        """Yield the parts that differ from the prediction in the direction of the speed."""
        was, sums, steps = self._prediction, self._sums, self._steps

        def differs(measured: float, predicted: float) -> bool:
            ratio = measured / predicted if predicted and measured else 1.0
            return ratio > PART if slower else ratio < 1 / PART

        if self._max_staleness != was.max_staleness:
            yield f"max_staleness is {self._max_staleness}, predicted {was.max_staleness}"
        completions, tokens = sums["rollout/trajectories"], max(1.0, sums["rollout/tokens"])
        if differs(completions / steps, was.completions):
            yield f"a step has {completions / steps:.0f} completions, predicted {was.completions}"
        length = tokens / max(1.0, completions)
        if differs(length, was.completion_tokens):
            words = f"{length:.0f} tokens, predicted {was.completion_tokens:.0f}"
            yield f"completions are {'longer' if slower else 'shorter'}: {words}"
        generated = sum(sums[f"device/{name}_s"] for name in GENERATED)
        trained = tokens + completions * was.prompt_tokens  # a trainer also reads the prompts
        expected = was.completions * was.completion_tokens
        for what, seconds, predicted in (
            ("generating", generated / tokens, was.generate_s / expected),
            (
                "training",
                sums["time/train_s"] / trained,
                was.train_s / (expected + was.completions * was.prompt_tokens),
            ),
        ):
            if differs(seconds, predicted):
                yield f"{what} a token takes {seconds / predicted:.2f}x of the predicted time"
        if not slower:
            return
        sync = sums["time/sync_s"] / steps
        if (sync - was.sync_s) * steps > SHARE * self._wall:
            yield f"a weight sync takes {sync:.3g} s, predicted {was.sync_s:.3g}"
        total = max(1e-9, sums["device/total_s"])
        for what, parts in UNPREDICTED.items():
            if (share := sum(sums[f"device/{name}_s"] for name in parts) / total) > SHARE:
                yield f"{what}: {share:.0%} of the device time, which is not predicted"


def _summed(name: str) -> bool:
    return name.startswith(("device/", "time/")) or name in TRAINED
