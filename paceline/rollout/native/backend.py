"""The native engine's interface to a device: KV cache, prefill and bursts of decode steps.

`SimpleBackend` computes synchronously on any device. `cuda.py` is the fast backend for GPUs, and
`module.py` serves the models without a built-in forward pass.
"""

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PretrainedConfig

from paceline.errors import ModelError
from paceline.model.engine_weights import ModuleWeights
from paceline.model.shape import head_dim, sliding_window
from paceline.model.weights import DecoderWeights, EngineWeights
from paceline.rollout.native.model import Decoder
from paceline.rollout.native.sampling import row_keys, sample
from paceline.rollout.native.slots import Sequence, Slots

PREFILL_TOKENS = 1024  # per forward pass, to bound its memory
Tokens = tuple[NDArray[np.int32], NDArray[np.float32]]  # tokens and log-probs, both [step, row]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens start..stop of a sequence's context, to be added to the cache."""

    sequence: Sequence
    start: int
    stop: int


class Burst(Protocol):
    def result(self) -> Tokens:
        """Wait for the tokens. Those beyond a row's limit are meaningless."""
        ...


class Backend(Protocol):
    # Number of bursts that are started before the oldest is read.
    ahead: int
    # Maximum prompt tokens per step while sequences are decoding: more would delay them.
    prefill_tokens: int
    # New sequences wait until one in `admit_divisor` slots is free: a prefill of a few sequences
    # takes nearly as long as a prefill of many.
    admit_divisor: int

    def kv_used(self) -> float | None:
        """Return the fraction of KV cache memory in use, or None if each slot owns its memory."""
        ...

    def steps(self, rows: int, brief: bool) -> int:
        """Return the number of tokens per row in a burst, of about 2 ms if `brief`."""
        ...

    def reserve(self, sequence: Sequence, source: Sequence | None) -> bool:
        """Reserve memory for the context of a new sequence; share its prefix with `source`.

        Returns False if there is no room now.
        """
        ...

    def grow(self, slots: Slots, positions: NDArray[np.int64]) -> bool:
        """Reserve memory for the live rows up to these positions; False if there is no room now."""
        ...

    def free(self, sequence: Sequence) -> None: ...

    def prefill(self, chunks: list[PrefillChunk], row: int) -> None:
        """Fill the KV cache; complete contexts go to the rows from `row` on, in order."""
        ...

    def fork(self, source: Sequence, row: int, copies: list[Sequence], target: int) -> None:
        """Give `copies`, in the rows from `target` on, the context of `source`, in `row`."""
        ...

    def place(self, slots: Slots, row: int) -> None:
        """Read the settings of the new rows, from `row` on, from `slots`."""
        ...

    def move(self, slots: Slots, moves: list[tuple[int, int]]) -> None:
        """Follow the moves (source row, target row) that `slots` made when it removed rows."""
        ...

    def decode(self, slots: Slots, steps: int) -> Burst: ...

    def changing_weights(self) -> AbstractContextManager[object]:
        """Return a context for changing weights: bursts started before it use the old ones."""
        ...

    def cache_bytes(self) -> int:
        """Return the size of the KV cache while awake."""
        ...

    def sleep(self) -> None:
        """Free the KV cache. No sequence may hold memory."""
        ...

    def wake(self) -> None: ...


def choose_backend(
    config: PretrainedConfig,
    weights: EngineWeights,
    slots: int,
    max_length: int,
    kv_memory_fraction: float,
    kv_dtype: torch.dtype | None = None,
) -> "Backend":
    """Return the fastest backend for this model.

    `kv_dtype`: type of the KV cache if it is not that of the weights.
    """
    if not isinstance(weights, DecoderWeights):
        if kv_dtype is not None:
            raise ModelError(
                f"rollout.kv_cache_dtype = 'fp8': the native engine calls the module of "
                f"{config.model_type}, whose KV cache has the dtype of the weights; expected a "
                "model with a built-in forward pass (docs/engines.md). Remove the setting, or set "
                "rollout.engine = 'vllm'"
            )
        from paceline.rollout.native.module import ModuleBackend

        assert isinstance(weights, ModuleWeights), "there are two kinds of weights"
        return ModuleBackend(weights, slots, max_length)
    window = sliding_window(config)
    if window is not None and max_length > window:
        raise ModelError(
            f"max_length = {max_length}: longer than the sliding window of the model; "
            f"expected at most {window} tokens"
        )
    dim = head_dim(config)
    if (
        weights.head.device.type == "cuda"
        and dim in (16, 32, 64, 128, 256)
        and importlib.util.find_spec("triton")
    ):
        from paceline.rollout.native.cuda import CudaBackend

        return CudaBackend(config, weights, slots, max_length, kv_memory_fraction, kv_dtype)
    return SimpleBackend(config, weights, slots, max_length, kv_dtype)


@dataclass(frozen=True, slots=True)
class CompletedBurst:
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    def result(self) -> Tokens:
        return self.tokens, self.logprobs


class StepByStep:
    """Base of the synchronous backends: a burst is one step, complete when `decode` returns.

    Every slot owns the memory of a sequence of maximum length.
    """

    ahead = 0
    prefill_tokens = 1 << 62
    admit_divisor = 8

    def kv_used(self) -> None:
        return None

    def steps(self, rows: int, brief: bool) -> int:
        return 1

    def reserve(self, sequence: Sequence, source: Sequence | None) -> bool:
        return True

    def grow(self, slots: Slots, positions: NDArray[np.int64]) -> bool:
        return True

    def free(self, sequence: Sequence) -> None: ...

    def changing_weights(self) -> AbstractContextManager[object]:
        return nullcontext()


class SimpleBackend(StepByStep):
    """Backend for the built-in forward pass on any device."""

    def __init__(
        self,
        config: PretrainedConfig,
        weights: DecoderWeights,
        slots: int,
        max_length: int,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self._weights = weights
        self._model = Decoder(config, weights, slots, max_length, kv_dtype)

    def prefill(self, chunks: list[PrefillChunk], row: int) -> None:
        """Prefill the longest contexts first; pad to the longest of a forward pass."""
        while chunks:
            length = chunks[0].stop
            n = max(1, min(len(chunks), PREFILL_TOKENS // length))
            tokens = np.zeros((n, length), np.int64)
            for index, chunk in enumerate(chunks[:n]):
                tokens[index, : chunk.stop] = chunk.sequence.context[: chunk.stop]
            for start in range(0, length, PREFILL_TOKENS):
                self._model.prefill(
                    self._tensor(tokens[:, start : start + PREFILL_TOKENS]), start, row
                )
            chunks, row = chunks[n:], row + n

    def fork(self, source: Sequence, row: int, copies: list[Sequence], target: int) -> None:
        self._model.copy(row, target, len(copies), len(copies[0].context) - 1)

    def place(self, slots: Slots, row: int) -> None: ...

    def move(self, slots: Slots, moves: list[tuple[int, int]]) -> None:
        for source, target in moves:
            self._model.copy(source, target, 1, int(slots.position[target]))

    def decode(self, slots: Slots, steps: int) -> CompletedBurst:
        n = len(slots.live)
        positions = slots.position[:n]
        logits = self._model.decode(self._tensor(slots.last[:n]), positions)
        keys = row_keys(slots.seed[:n], positions + 1)
        tokens, logprobs = sample(
            logits, keys, slots.temperature[:n], slots.top_k[:n], slots.top_p[:n]
        )
        return CompletedBurst(tokens[None], logprobs[None])

    def cache_bytes(self) -> int:
        return self._model.kv.nbytes

    def sleep(self) -> None:
        self._model.drop_cache()

    def wake(self) -> None:
        self._model.make_cache()

    def _tensor(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self._weights.head.device)
