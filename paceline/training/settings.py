"""Settings of the trainer: backend, optimizer, learning rate, micro-batches and LoRA."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from paceline.settings import Settings, automatic

Beta = Annotated[float, Field(ge=0, lt=1)]


class LoraSettings(Settings):
    """Adapters trained while the model's weights are frozen.

    They have no dropout, because training must compute the policy that sampled.
    """

    rank: int = Field(16, ge=1)
    """Rank of each adapter's matrices."""
    alpha: int = Field(32, ge=1)
    """Scale of the adapters: their contribution to a weight is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Linear layers with an adapter, for example ["q_proj", "v_proj"]. Default: all of attention
    and MLP."""


class TrainSettings(Settings):
    backend: Literal["single", "fsdp", "megatron"] = "single"
    """Training backend: one device, or `placement.train_ranks` devices with FSDP2 or
    megatron-core."""
    tensor_parallel: int = Field(1, ge=1)
    """Number of ranks that split each layer's matrices (fsdp, megatron)."""
    pipeline_parallel: int = Field(1, ge=1)
    """Number of ranks that split the model by layers (megatron)."""
    offload: bool = False
    """Offload trainer-only state to host memory between train steps. For devices shared with other
    roles."""
    learning_rate: float = Field(1e-6, ge=0)
    """Peak learning rate of AdamW."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate after warm-up. linear and cosine reach 0 right after the last
    step."""
    warmup_steps: int = Field(0, ge=0)
    """Number of steps over which the learning rate rises linearly; the first step's is above 0."""
    staleness_kl_target: float = Field(0.01, ge=0)
    """KL between the policies that sampled a batch and the policy it trains, in nats per token,
    above which the step's learning rate is lower: it is multiplied by target / KL. 0: never. No
    effect on fresh data."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices; norms and biases do not decay."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moments. With 0.999, a rare signal after quiet steps
    makes an update of three times the learning rate."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradient norm above which gradients are scaled down."""
    max_skipped_updates: int = Field(5, ge=1)
    """Number of consecutive train steps with a skipped update (a loss, gradient or log-prob is not
    finite) after which the run fails."""
    micro_batch_tokens: int = automatic(4096, gt=0)
    """Maximum tokens per forward and backward pass. Affects memory and speed, not the gradient.
    auto: as many as memory allows, at most 32,768."""
    gradient_checkpointing: bool = automatic(False)
    """Recompute activations in the backward pass: less memory, about one third more compute. auto:
    only if memory requires it."""
    dtype: Literal["float32", "bfloat16"] = automatic("float32")
    """Compute dtype of matmuls. Parameters and optimizer state stay float32. auto: bfloat16 on GPUs
    that support it."""
    lora: LoraSettings | None = None
    """LoRA settings: train only adapters of the actor (needs the extra "lora", and about 10 times
    the learning rate). Default: train all weights."""

    @field_validator("backend", mode="before")
    @classmethod
    def _fsdp2_is_fsdp(cls, value: Any) -> Any:
        return "fsdp" if value == "fsdp2" else value

    @model_validator(mode="after")
    def _check_backend(self) -> "TrainSettings":
        if self.backend == "single" and self.tensor_parallel > 1:
            raise ValueError(
                f"train.tensor_parallel = {self.tensor_parallel} contradicts train.backend = "
                "'single', which is one device; use 'fsdp' or 'megatron'"
            )
        if self.backend != "megatron" and self.pipeline_parallel > 1:
            raise ValueError(
                f"train.pipeline_parallel = {self.pipeline_parallel} contradicts train.backend = "
                f"{self.backend!r}; use 'megatron'"
            )
        if self.backend != "single" and self.lora is not None:
            raise ValueError(
                f"train.lora contradicts train.backend = {self.backend!r}, because adapters are "
                "trained on one device; use 'single'"
            )
        return self

    def learning_rate_at(self, step: int, total_steps: int) -> float:
        """Return the learning rate of train step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.lr_schedule == "constant":
            return self.learning_rate
        done = min(1.0, (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps))
        return self.learning_rate * (
            1 - done if self.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        )
