"""Settings of weight sync and of the check that engine and trainer have the same weights."""

from typing import Literal

from pydantic import Field

from paceline.settings import Settings

# Mean difference of log-probs by `train.dtype`; two correct implementations differ by about 1e-6
# in float32 and 0.02 in bfloat16. "fp8" is for engines with FP8 weights or an FP8 KV cache, whose
# difference is up to 0.18 (benchmarks/fp8_mismatch.py).
MISMATCH_LIMITS = {"float32": 0.02, "bfloat16": 0.3, "fp8": 0.5}


class SyncSettings(Settings):
    mismatch_limit: float | None = Field(None, gt=0)
    """Mean difference between the engine's and the trainer's log-probs of the same version that
    ends the run. Default: 0.02 for train.dtype = "float32", 0.3 for "bfloat16", and 0.5 with FP8 in
    the engine."""
    transport: Literal["auto", "stream", "collective"] = "auto"
    """Weight transfer to engines in other workers: over TCP ("stream") or by broadcast with NCCL or
    gloo ("collective"). "auto": shared memory on one machine; between machines a broadcast for GPUs
    and a stream for CPUs."""
    retries: int = Field(3, ge=0)
    """Number of times a failed weight sync is retried before the run fails, or before an engine
    that fails alone is replaced."""
    timeout_s: float = Field(60.0, gt=0)
    """Maximum seconds for one weight sync."""
    straggler_timeout_s: float = Field(5.0, gt=0)
    """Seconds to wait for the other engines once one has loaded the new weights. A slower engine
    gets no new prompts until it has caught up."""
