"""How weights are updated, and the learning rate as a pure function of the step."""

import math
from typing import Literal

from pydantic import Field, model_validator

from paceline.settings import Settings


class LoraSettings(Settings):
    """Train small adapters beside the frozen weights. They have no dropout: training must see the policy that sampled."""

    rank: int = Field(16, ge=1)
    alpha: int = Field(32, ge=1)
    """What the adapters add to a weight is scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Linear layers that get an adapter, for example ["q_proj", "v_proj"]. Unset: all of attention and MLP."""


class TrainSettings(Settings):
    backend: Literal["single", "fsdp", "megatron"] = "single"
    """What holds the model: one device, or `placement.train_ranks` of them with FSDP2 or megatron-core."""
    tensor_parallel: int = Field(1, ge=1)
    """Ranks that share each layer's matrices."""
    pipeline_parallel: int = Field(1, ge=1)
    """Ranks that each have some of the layers (megatron)."""
    offload: bool = False
    """Keep what only the trainer needs in host memory while it does not train. For devices it shares with others."""
    learning_rate: float = Field(1e-6, ge=0)
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate falls after the warm-up; linear and cosine reach 0 just after the last step."""
    warmup_steps: int = Field(0, ge=0)
    """The rate rises linearly over these steps; the first one already learns."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled; on matrices only, never on norms and biases."""
    betas: tuple[float, float] = (0.9, 0.999)
    max_grad_norm: float = Field(1.0, gt=0)
    micro_batch_tokens: int = Field(4096, gt=0)
    """Tokens per forward/backward pass. Changes memory and speed, not the gradient."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more work."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What matrix products are computed in. Parameters and optimizer state stay float32."""
    lora: LoraSettings | None = None
    """Train adapters only (the actor's; needs the extra "lora"). Unset: all weights. Adapters want a rate about 10 times as high."""

    @model_validator(mode="after")
    def _fits_the_backend(self) -> "TrainSettings":
        if self.backend == "single" and self.tensor_parallel > 1:
            raise ValueError(
                f"train.tensor_parallel = {self.tensor_parallel} contradicts train.backend = 'single', which is one device; "
                "use 'fsdp' or 'megatron'"
            )
        if self.backend != "megatron" and self.pipeline_parallel > 1:
            raise ValueError(
                f"train.pipeline_parallel = {self.pipeline_parallel} contradicts train.backend = {self.backend!r}: use 'megatron'"
            )
        if self.backend != "single" and self.lora is not None:
            raise ValueError(
                f"train.lora contradicts train.backend = {self.backend!r}: adapters are trained on one device; use 'single'"
            )
        return self

    def learning_rate_at(self, step: int, total_steps: int) -> float:
        """The rate of train step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.lr_schedule == "constant":
            return self.learning_rate
        done = min(1.0, (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps))
        return self.learning_rate * (
            1 - done if self.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        )
