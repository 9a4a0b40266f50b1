"""Costs of a device: what a decode step, a train step and a weight sync take, in seconds."""

import json
import math
from bisect import bisect_left
from pathlib import Path

from pydantic import Field, ValidationError, field_validator

from paceline.errors import ConfigError
from paceline.settings import Settings


class CostModel(Settings):
    """The defaults are those of a 0.5B model on one H200 (benchmarks/results/gpu_engine.json and
    gpu_train.json). An engine may have several devices; its costs are those of the whole engine."""

    decode_step_s: float = Field(1.05e-3, ge=0)
    """Seconds of a decode step, independent of the load."""
    decode_sequence_s: float = Field(1.7e-6, ge=0)
    """Seconds that each live sequence adds to a decode step."""
    decode_points: tuple[tuple[int, float], ...] = ()
    """Measured decode steps as (sequences, seconds) without a KV cache. Other numbers of sequences
    are interpolated, and more of them cost as much each as between the first and the last point;
    decode_step_s and decode_sequence_s do not count then."""
    decode_context_s: float = Field(2.8e-9, ge=0)
    """Seconds that each token in the KV cache adds to a decode step."""
    prefill_token_s: float = Field(1.4e-6, ge=0)
    """Seconds per token of a prompt that is prefilled."""
    prefill_sequence_s: float = Field(0.0, ge=0)
    """Seconds that each sequence adds when it starts, also if another one with its prompt is
    prefilled: messages and bookkeeping of the engine."""
    train_step_s: float = Field(0.011, ge=0)
    """Seconds of a train step, independent of the batch: optimizer, communication, messages."""
    train_token_s: float = Field(6.6e-6, ge=0)
    """Seconds per token on one training device. Devices divide them. The completions of a prompt
    share its tokens."""
    train_context_s: float = Field(0.0, ge=0)
    """Seconds that a token adds per token before it in its row: attention of long rows."""
    critic_factor: float = Field(1.0, ge=0)
    """Cost of training the critic relative to the actor, if there is one."""
    publish_s: float = Field(0.0, ge=0)
    """Seconds in which the trainer publishes new weights, while engines generate."""
    load_s: float = Field(0.02, ge=0)
    """Seconds in which an engine loads new weights and does not generate."""
    switch_s: float = Field(0.0, ge=0)
    """Seconds that a shared device needs to change between generation and training."""
    overlap_decode: float = Field(2.0, ge=1)
    """Slowdown of generation while the same device trains (placement.overlap). 2 with
    overlap_train = 2: no gain over alternating."""
    overlap_train: float = Field(2.0, ge=1)
    """Slowdown of training while the same device generates."""
    pool_decode: float = Field(1.0, ge=1)
    """Slowdown of generation while a separate pool of the same machine trains: pools share memory
    bandwidth, and on CPUs the cores."""
    pool_train: float = Field(1.0, ge=1)
    """Slowdown of training while a separate pool of the same machine generates."""
    turns: int = Field(1, ge=1)
    """Generations per trajectory. The lengths are those of one generation."""
    environment_s: str = "fixed:0"
    """Seconds of tools and reward after each generation, as a distribution (see --lengths)."""
    host_completion_s: float = Field(0.0, ge=0)
    """Seconds of the controller per completion: messages, text, reward and queue. It handles one
    completion at a time, while devices work."""
    host_trained_s: float = Field(0.0, ge=0)
    """Seconds of the controller per trained completion: batch, metrics and records. The trainer
    waits for them."""
    failures_per_hour: float = Field(0.0, ge=0)
    """Failures per hour of an engine in a separate pool."""
    restart_s: float = Field(60.0, ge=0)
    """Seconds until a replacement of a failed engine has started."""
    fit_error: float | None = Field(None, ge=0)
    """Mean relative error of the fit, if the costs were measured."""

    @field_validator("decode_points")
    @classmethod
    def _ascending(cls, points: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        if any(seconds < 0 for _, seconds in points):
            raise ValueError("seconds of a decode step are below 0")
        return tuple(sorted(points))

    def burst_s(self, steps: int, sequences: int, context: int) -> float:
        """Return the seconds of some decode steps. Every step adds a token per sequence."""
        first = self._step_s(sequences, context)
        return steps * first + self.decode_context_s * sequences * steps * (steps - 1) / 2

    def steps_within(self, seconds: float, sequences: int, context: int) -> int:
        """Return how many decode steps start within some seconds: the inverse of `burst_s`."""
        first = self._step_s(sequences, context)
        growth = self.decode_context_s * sequences
        if growth == 0:
            return math.ceil(seconds / first) if first else 0
        linear = first - growth / 2
        # burst_s = growth / 2 * steps**2 + linear * steps; this form has no cancellation.
        root = math.sqrt(linear * linear + 2 * growth * seconds)
        return math.ceil(2 * seconds / (linear + root))

    def train_s(
        self, tokens: float, devices: int, factor: float = 1.0, context: float = 0.0
    ) -> float:
        """Return the seconds of a train step. `context`: the tokens before each token, summed."""
        all_s = self.train_token_s * tokens + self.train_context_s * context
        return factor * (self.train_step_s + all_s / devices)

    def _step_s(self, sequences: int, context: int) -> float:
        return self._decode_s(sequences) + self.decode_context_s * context

    def _decode_s(self, sequences: int) -> float:
        points = self.decode_points
        if not points:
            return self.decode_step_s + self.decode_sequence_s * sequences
        right = bisect_left(points, (sequences, 0.0))
        if right == len(points):  # neighbors are too close together to tell the direction
            (first, first_s), (last, last_s) = points[0], points[-1]
            each = max(0.0, last_s - first_s) / max(1, last - first)
            return last_s + each * (sequences - last)
        if right == 0 or points[right][0] == sequences:
            return points[right][1]
        (low, low_s), (high, high_s) = points[right - 1 : right + 1]
        return low_s + (high_s - low_s) * (sequences - low) / (high - low)


def read_costs(path: Path) -> CostModel:
    try:
        return CostModel.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"--costs {path} cannot be read: {error.strerror}; expected a JSON file, for example "
            "one that `paceline plan RECIPE --probe` wrote"
        ) from None
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, item['loc'])) or 'the file'}: {item['msg']}"
            for item in error.errors()
        )
        known = ", ".join(CostModel.model_fields)
        raise ConfigError(f"--costs {path}: {problems}. Known costs: {known}") from None


def write_costs(path: Path, costs: CostModel) -> None:
    try:
        path.write_text(json.dumps(costs.model_dump(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
