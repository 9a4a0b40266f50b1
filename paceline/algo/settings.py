"""How a batch of scored answers becomes a gradient."""

from typing import Literal, Self

from pydantic import Field, model_validator

from paceline.settings import Settings

Aggregation = Literal["token", "sequence", "constant"]


class AlgorithmSettings(Settings):
    name: Literal["grpo", "rloo", "ppo"] = "grpo"
    """grpo: rewards compared within a group; rloo: against the mean of the others; ppo: GAE with a critic."""
    clip_low: float = Field(0.2, ge=0, le=1)
    """The probability ratio stops paying below 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0)
    """The probability ratio stops paying above 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1)
    """With a negative advantage the loss of a token grows no further than this ratio."""
    importance_cap: float | None = Field(None, gt=0)
    """Weigh tokens by trainer/sampler probability, at most this; the ratio is then taken against the trainer's own
    log-probs at the start of the step. For stale batches; costs one more forward pass."""
    normalize_std: bool = True
    """grpo: divide by the group's standard deviation; ppo: whiten advantages over the batch."""
    aggregation: Aggregation = "token"
    """token: mean over all tokens; sequence: mean over rows of the row's mean; constant: sum / (rows * constant_length)."""
    constant_length: int | None = Field(None, gt=0)
    """Tokens per row that the constant aggregation divides by."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL to the reference model in the loss (k3 estimator); above 0 a reference role is needed."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token (ppo)."""
    lam: float = Field(1.0, ge=0, le=1)
    """Decay of the advantage trace (ppo)."""
    value_clip: float | None = Field(0.2, gt=0)
    """The critic moves a value by at most this from what it was when the batch was taken."""
    epochs: int = Field(1, ge=1)
    """Passes over one batch."""
    mini_batches: int = Field(1, ge=1)
    """Optimizer steps per pass."""

    @model_validator(mode="after")
    def _constant_needs_a_length(self) -> Self:
        if (self.aggregation == "constant") != (self.constant_length is not None):
            raise ValueError(
                f"aggregation = {self.aggregation!r} and constant_length = {self.constant_length}: "
                "set constant_length with aggregation = 'constant' and only then"
            )
        return self

    @property
    def needs_critic(self) -> bool:
        return self.name == "ppo"

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0
