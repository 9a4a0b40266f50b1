"""How a batch of scored answers becomes a gradient: a preset by name, and every part of it open to change."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from paceline.algo.presets import PRESETS
from paceline.settings import Settings

Advantage = Literal["gae", "group", "leave_one_out", "greedy", "length_weighted", "return"]
Loss = Literal["clip", "sequence_clip", "cispo", "sapo", "pg"]
Aggregation = Literal["token", "sequence", "constant"]
Correction = Literal["none", "truncate", "mask", "icepop", "m2po"]
Estimator = Literal["k1", "k2", "k3"]
Range = tuple[float, float]

CORRECTION_RANGES: dict[str, Range] = {
    "truncate": (0.0, 2.0),
    "mask": (0.5, 2.0),
    "icepop": (0.5, 5.0),
}


class AlgorithmSettings(Settings):
    name: Literal[
        "grpo",
        "dr_grpo",
        "dapo",
        "gspo",
        "cispo",
        "sapo",
        "ppo",
        "rloo",
        "reinforce++",
        "reinforce++_baseline",
        "remax",
        "opo",
        "pg",
    ] = "grpo"
    """The preset: it gives the settings below their values, and whatever is set beside it wins."""
    advantage: Advantage = "group"
    """gae: critic; group: minus the group's mean; leave_one_out: minus the mean of the others; greedy: minus the greedy answer's
    reward; length_weighted: minus the group's mean weighted by length; return: reward still to come, no baseline."""
    normalize: Literal["none", "group", "batch"] = "group"
    """group: divide by the deviation of the group's rewards; batch: mean 0 and deviation 1 over all trained tokens."""
    loss: Loss = "clip"
    """clip: PPO; sequence_clip: one ratio per answer (GSPO); cispo: clipped weights; sapo: soft gate; pg: plain policy gradient."""
    clip_low: float = Field(0.2, ge=0, le=1)
    """The probability ratio stops counting below 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0)
    """The probability ratio stops counting above 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1)
    """With a negative advantage the loss of a token grows no further than this ratio (loss = clip)."""
    sapo_temperatures: Range = (1.0, 1.05)
    """How sharply the soft gate closes, for positive and negative advantages (loss = sapo)."""
    aggregation: Aggregation = "sequence"
    """token: mean over all tokens; sequence: mean over rows of the row's mean; constant: sum / (rows * constant_length)."""
    constant_length: int | None = Field(None, gt=0)
    """Tokens per row that the constant aggregation divides by. Unset: the longest answer allowed."""
    proximal: Literal["behavior", "recomputed", "interpolated"] = "behavior"
    """What ratios are taken against: the policy that sampled; the trainer's own at the start of the step (one more forward pass
    when there are several updates per step); or a guess between the sampler and the present by the token's staleness."""
    correction: Correction = "none"
    """How a token's weight proximal/sampler is kept in bounds. Setting it sets proximal = recomputed, unless that is set too."""
    correction_level: Literal["token", "sequence"] = "token"
    """Weights of single tokens, or the product over the answer for all its tokens."""
    correction_range: Range | None = None
    """Bounds of the weight: clamped to them (truncate) or 0 outside (mask, icepop). Unset: 0-2, 0.5-2, 0.5-5."""
    m2_threshold: float = Field(0.04, gt=0)
    """The largest log-weights are masked until the mean of their squares is below this (correction = m2po)."""
    reject_range: Range | None = None
    """Answers whose mean weight (geometric) is outside are not learned from."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL to the reference model; above 0 a reference role is needed."""
    kl_placement: Literal["loss", "reward"] = "loss"
    """A term of the loss, or taken off the reward token by token."""
    kl_estimator: Estimator = "k3"
    """k1 and k2 in the loss have the gradient of the KL; k3 is GRPO's: exact as a number, but its gradient is another KL's."""
    kl_target: float | None = Field(None, gt=0)
    """Nats per token that kl_coef is steered to, from its start value. Unset: kl_coef is fixed."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token (advantage = gae or return)."""
    lam: float = Field(1.0, ge=0, le=1)
    """Decay of the advantage trace (advantage = gae)."""
    value_clip: float | None = Field(0.2, gt=0)
    """The critic moves a value by at most this from what it was when the batch was taken."""
    critic_warmup: int = Field(0, ge=0)
    """First steps in which only the critic learns."""
    epochs: int = Field(1, ge=1)
    """Passes over one batch."""
    mini_batches: int = Field(1, ge=1)
    """Optimizer steps per pass."""
    overlong: Literal["keep", "mask", "penalty"] = "keep"
    """Answers cut off at the longest length: trained on, left out, or scored down softly as they near it (DAPO)."""
    overlong_buffer: int | None = Field(None, gt=0)
    """Tokens before the longest length over which the penalty grows from 0 to 1. Unset: a fifth of it."""
    dynamic_sampling: bool = False
    """Groups whose rewards are all equal are replaced by new ones before the step."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        """What the preset says where the user says nothing, and what a correction implies."""
        if not isinstance(data, Mapping):
            return data
        values = {**PRESETS.get(data.get("name", "grpo"), {}), **data}
        if values.get("correction", "none") != "none" or values.get("reject_range") is not None:
            values.setdefault("proximal", "recomputed")
        elif values.get("proximal", "behavior") != "behavior":
            values.setdefault("correction", "truncate")
        if values.get("correction_range") is None:
            values["correction_range"] = CORRECTION_RANGES.get(values.get("correction", "none"))
        return values

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        corrected = self.correction != "none" or self.reject_range is not None
        for wrong, one, other, why in (
            (
                corrected and self.proximal == "behavior",
                "correction",
                "proximal",
                "the weight proximal/sampler is then 1 everywhere",
            ),
            (
                self.correction == "m2po" and self.proximal == "interpolated",
                "correction",
                "proximal",
                "m2po needs the recomputed one",
            ),
            (
                self.correction == "icepop" and self.correction_level != "token",
                "correction",
                "correction_level",
                "icepop masks tokens",
            ),
            (
                self.correction == "m2po" and self.correction_level != "token",
                "correction",
                "correction_level",
                "m2po masks tokens",
            ),
            (
                self.normalize == "group" and self.advantage in ("gae", "return"),
                "normalize",
                "advantage",
                "it differs by token",
            ),
            (
                self.normalize == "group" and self.advantage == "greedy",
                "normalize",
                "advantage",
                "equal attempts have deviation 0",
            ),
            (
                self.kl_target is not None and self.kl_coef == 0,
                "kl_target",
                "kl_coef",
                "steering multiplies, so it must start above 0",
            ),
        ):
            if wrong:
                raise ValueError(
                    f"{one} = {getattr(self, one)!r} contradicts {other} = {getattr(self, other)!r}: {why}"
                )
        for name in ("correction_range", "reject_range", "sapo_temperatures"):
            bounds = getattr(self, name)
            if bounds is not None and not 0 <= bounds[0] <= bounds[1]:
                raise ValueError(f"{name} = {bounds}: expected two numbers, 0 <= first <= second")
        if self.sapo_temperatures[0] == 0:
            raise ValueError(
                f"sapo_temperatures = {self.sapo_temperatures}: expected numbers above 0"
            )
        return self

    @model_validator(mode="after")
    def _nothing_idle(self) -> Self:
        """A setting that would change nothing is a misunderstanding, so it is refused rather than ignored."""
        for name, owner, owners in IDLE_UNLESS:
            default = PRESETS[self.name].get(name, type(self).model_fields[name].default)
            if getattr(self, name) != default and getattr(self, owner) not in owners:
                raise ValueError(
                    f"{name} = {getattr(self, name)!r} has no effect with {owner} = {getattr(self, owner)!r}: "
                    f"it is used with {owner} = {' or '.join(map(repr, owners))} only"
                )
        return self

    @property
    def needs_critic(self) -> bool:
        return self.advantage == "gae"

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def needs_greedy_baseline(self) -> bool:
        return self.advantage == "greedy"

    @property
    def compares_attempts(self) -> bool:
        """Whether one attempt per prompt would teach nothing."""
        return self.advantage in ("group", "leave_one_out", "length_weighted")

    @property
    def updates_per_step(self) -> int:
        return self.epochs * self.mini_batches


# setting, and the values of another without which it does nothing
IDLE_UNLESS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("dual_clip", "loss", ("clip",)),
    ("sapo_temperatures", "loss", ("sapo",)),
    ("clip_low", "loss", ("clip", "sequence_clip", "cispo")),
    ("clip_high", "loss", ("clip", "sequence_clip", "cispo")),
    ("constant_length", "aggregation", ("constant",)),
    ("correction_range", "correction", ("truncate", "mask", "icepop")),
    ("correction_level", "correction", ("truncate", "mask", "icepop")),
    ("m2_threshold", "correction", ("m2po",)),
    ("gamma", "advantage", ("gae", "return")),
    ("lam", "advantage", ("gae",)),
    ("value_clip", "advantage", ("gae",)),
    ("critic_warmup", "advantage", ("gae",)),
    ("overlong_buffer", "overlong", ("penalty",)),
)
