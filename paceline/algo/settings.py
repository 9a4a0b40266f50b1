"""Algorithm settings: how a batch of scored completions becomes a gradient.

A preset (`name`) gives the defaults; every part of it can be changed.
"""

from collections.abc import Mapping
from typing import Any, Literal, Self, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator

from paceline.algo.conflicts import check_conflicts, check_ranges
from paceline.algo.presets import PRESETS
from paceline.plugins import Plugin
from paceline.settings import Settings

Advantage = Literal["gae", "group", "leave_one_out", "greedy", "length_weighted", "return", "none"]
Loss = Literal["clip", "sequence_clip", "cispo", "sapo", "pg"]
Aggregation = Literal["token", "sequence", "constant"]
Correction = Literal["none", "truncate", "mask", "icepop", "m2po"]
Estimator = Literal["k1", "k2", "k3"]
Range = tuple[float, float]

BUILT_IN: dict[str, tuple[str, ...]] = {
    "advantage": get_args(Advantage),
    "loss": get_args(Loss),
    "correction": get_args(Correction),
}
GROUPS = {
    "advantage": "paceline.advantages",
    "loss": "paceline.losses",
    "correction": "paceline.corrections",
}
CUSTOM = "a custom function"
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
        "distill",
    ] = "grpo"
    """Algorithm preset. It sets the defaults below; explicit settings override it."""
    advantage: Advantage | Plugin = Field("group", union_mode="left_to_right")
    """gae: critic; group: reward minus the group mean; leave_one_out: minus the mean of the other
    rewards; greedy: minus the reward of the greedy completion; length_weighted: minus the
    length-weighted group mean; return: sum of future rewards, no baseline; none: 0, rewards are
    only recorded. Or a custom function: "file.py:function"."""
    normalize: Literal["none", "group", "batch"] = "group"
    """group: divide by the standard deviation of the group's rewards; batch: mean 0 and standard
    deviation 1 over all trained tokens. Default with a custom advantage: none."""
    loss: Loss | Plugin = Field("clip", union_mode="left_to_right")
    """clip: PPO; sequence_clip: ratio of the whole completion (GSPO); cispo: clipped weights;
    sapo: soft gate; pg: plain policy gradient. Or a custom function: "file.py:function"."""
    clip_low: float = Field(0.2, ge=0, le=1)
    """Lower clip range: the probability ratio is clipped at 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0)
    """Upper clip range: the probability ratio is clipped at 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1)
    """Upper bound of the ratio in the loss of tokens with a negative advantage (loss = clip).
    Default: no bound."""
    sapo_temperatures: Range = (1.0, 1.05)
    """Steepness of the soft gate for positive and for negative advantages (loss = sapo)."""
    aggregation: Aggregation = "sequence"
    """token: mean over all tokens; sequence: mean over rows of the row's mean; constant:
    sum / (rows * constant_length)."""
    constant_length: int | None = Field(None, gt=0)
    """Tokens per row that the constant aggregation divides by. Default:
    rollout.max_response_length."""
    proximal: Literal["behavior", "recomputed", "interpolated"] = "behavior"
    """Policy that ratios are taken against. behavior: the policy that sampled; recomputed: the
    trainer's policy at the start of the step, which costs a forward pass with several updates per
    step; interpolated: an estimate between the sampler and the current policy, by staleness."""
    correction: Correction | Plugin = Field("none", union_mode="left_to_right")
    """How the weight proximal / sampler of a token is bounded: none, truncate, mask, icepop, m2po,
    or a custom function: "file.py:function". A correction also sets proximal = recomputed, unless
    proximal is set."""
    correction_level: Literal["token", "sequence"] = "token"
    """token: a weight per token; sequence: the product over the completion, for all its tokens."""
    correction_range: Range | None = None
    """Bounds of the weight: clamped to them (truncate), or 0 outside (mask, icepop). Default:
    0-2 for truncate, 0.5-2 for mask, 0.5-5 for icepop."""
    m2_threshold: float = Field(0.04, gt=0)
    """Upper bound of the mean squared log-weight (correction = m2po). The largest are masked."""
    reject_range: Range | None = None
    """Bounds of the geometric mean weight of a completion. Completions outside are masked.
    Default: no bounds."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL to the reference model. Above 0, the run has a reference role."""
    teacher: str | None = None
    """Model of the reference role, to distill it into the policy: local directory, GGUF file,
    Hugging Face model ID or "tiny-teacher". It needs the tokenizer of the policy, but may have
    another size. Default: the initial policy is the reference."""
    kl_placement: Literal["loss", "reward", "advantage"] = "loss"
    """loss: a term of the loss; reward: subtracted from the reward of each token; advantage:
    subtracted from the advantage of each token, with the estimator k1."""
    kl_estimator: Estimator = "k3"
    """KL estimator. In the loss, k1 and k2 have the gradient of KL(policy || reference), k3 that
    of KL(reference || policy); GRPO uses k3."""
    kl_target: float | None = Field(None, gt=0)
    """Target KL in nats per token. kl_coef is adapted towards it. Default: kl_coef is fixed."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token (advantage = gae or return)."""
    lam: float = Field(1.0, ge=0, le=1)
    """Decay of the advantage trace per token (advantage = gae)."""
    value_clip: float | None = Field(0.2, gt=0)
    """Clip range of the value loss around the values predicted before the update."""
    critic_warmup: int = Field(0, ge=0)
    """Number of first steps in which only the critic is trained."""
    epochs: int = Field(1, ge=1)
    """Passes over each batch."""
    mini_batches: int = Field(1, ge=1)
    """Optimizer steps per pass."""
    overlong: Literal["keep", "mask", "penalty"] = "keep"
    """Completions truncated at the maximum length. keep: train on them; mask: do not train on
    them; penalty: lower the reward of completions near the maximum length (DAPO)."""
    overlong_buffer: int | None = Field(None, gt=0)
    """Tokens before the maximum length over which the penalty grows from 0 to 1. Default: a fifth
    of the maximum length."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal by new groups before the step."""

    @model_validator(mode="before")
    @classmethod
    def _add_defaults(cls, data: Any) -> Any:
        """Add the defaults of the preset and those that a correction implies."""
        if not isinstance(data, Mapping):
            return data
        values = {**PRESETS.get(str(data.get("name", "grpo")), {}), **data}
        if "advantage" in data and data["advantage"] not in BUILT_IN["advantage"]:
            values["normalize"] = data.get("normalize", "none")
        if values.get("correction", "none") != "none" or values.get("reject_range") is not None:
            values.setdefault("proximal", "recomputed")
        elif values.get("proximal", "behavior") != "behavior":
            values.setdefault("correction", "truncate")
        if values.get("correction_range") is None:
            values["correction_range"] = CORRECTION_RANGES.get(str(values.get("correction")))
        return values

    @field_validator("advantage", "loss", "correction", mode="before")
    @classmethod
    def _built_in_or_custom(cls, value: Any, info: ValidationInfo) -> Any:
        name = str(info.field_name)
        if isinstance(value, str) and value in BUILT_IN[name]:
            return value
        plugin = Plugin.of(value)
        plugin.check(GROUPS[name], BUILT_IN[name])
        return plugin

    @model_validator(mode="after")
    def _check_conflicts(self) -> Self:
        check_conflicts(self)
        check_ranges(self)
        return self

    @model_validator(mode="after")
    def _check_effects(self) -> Self:
        """Reject settings without effect: ignoring them would hide a misunderstanding."""
        for name, other, effective in EFFECTIVE_WITH:
            default = PRESETS[self.name].get(name, type(self).model_fields[name].default)
            value = getattr(self, other)
            kind = CUSTOM if isinstance(value, Plugin) else value
            if getattr(self, name) != default and kind not in effective:
                choices = [choice if choice is CUSTOM else repr(choice) for choice in effective]
                raise ValueError(
                    f"{name} = {getattr(self, name)!r} has no effect with {other} = {value!r}: "
                    f"it is used only with {other} = {' or '.join(choices)}"
                )
        return self

    @property
    def needs_critic(self) -> bool:
        return self.advantage == "gae"

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def uses_rewards(self) -> bool:
        """Whether rewards are trained on; otherwise a run needs none."""
        return self.advantage != "none"

    @property
    def needs_greedy_baseline(self) -> bool:
        return self.advantage == "greedy"

    @property
    def compares_completions(self) -> bool:
        """Whether the baseline comes from the group, so that a group of one has advantage 0."""
        return self.advantage in ("group", "leave_one_out", "length_weighted")

    @property
    def corrects_whole_batch(self) -> bool:
        """Whether the weight of a token may depend on all tokens of the batch."""
        return self.correction == "m2po" or isinstance(self.correction, Plugin)

    @property
    def updates_per_step(self) -> int:
        return self.epochs * self.mini_batches


# A setting, another setting, and the values of the other with which the first has an effect. A
# custom function gets the settings, so it may use those of the part that it replaces.
EFFECTIVE_WITH: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("dual_clip", "loss", ("clip", CUSTOM)),
    ("sapo_temperatures", "loss", ("sapo", CUSTOM)),
    ("clip_low", "loss", ("clip", "sequence_clip", "cispo", CUSTOM)),
    ("clip_high", "loss", ("clip", "sequence_clip", "cispo", CUSTOM)),
    ("constant_length", "aggregation", ("constant",)),
    ("correction_range", "correction", ("truncate", "mask", "icepop", CUSTOM)),
    ("correction_level", "correction", ("truncate", "mask", "icepop", CUSTOM)),
    ("m2_threshold", "correction", ("m2po", CUSTOM)),
    ("gamma", "advantage", ("gae", "return", CUSTOM)),
    ("lam", "advantage", ("gae", CUSTOM)),
    ("value_clip", "advantage", ("gae",)),
    ("critic_warmup", "advantage", ("gae",)),
    ("overlong_buffer", "overlong", ("penalty",)),
)
