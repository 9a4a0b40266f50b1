"""The native engine's interface to a device: KV cache, prefill and bursts of decode steps.

`SimpleBackend` computes synchronously on any device. `cuda.py` is the fast backend for GPUs, and
`module.py` serves the models without a built-in forward pass.
"""

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PretrainedConfig

from paceline.errors import ModelError
from paceline.model.engine_weights import ModuleWeights
from paceline.model.shape import head_dim, sliding_window
from paceline.model.support import HEAD_DIMS
from paceline.model.weights import DecoderWeights, EngineWeights
from paceline.rollout.native.model import Decoder
from paceline.rollout.native.rows import Copy, Data, KeptRows, Place, copy_at_once
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
    # Whether a slot owns the memory of its sequence, so that a kept context takes up a slot.
    kept_in_slots: bool

    def kv_used(self, kept: list[Sequence]) -> float | None:
        """Return the fraction of KV cache memory in use, or None if each slot owns its memory.

        Memory that only `kept` contexts hold is not in use.
        """
        ...

    def steps(self, rows: int, brief: bool) -> int:
        """Return the number of tokens per row in a burst, of about 2 ms if `brief`."""
        ...

    def reserve(self, sequence: Sequence, source: Sequence | None) -> bool:
        """Reserve memory for the context of a new sequence; share its prefix with `source`.

        Returns False if there is no room now.
        """
        ...

    def reuse(self, sequence: Sequence, kept: Sequence, length: int) -> bool:
        """Reserve memory for a new sequence that begins with the first `length` tokens of `kept`.

        `kept` gives its memory to the new sequence. Returns False if there is no room now; `kept`
        has its memory then.
        """
        ...

    def grow(self, slots: Slots, positions: NDArray[np.int64]) -> bool:
        """Reserve memory for the live rows up to these positions; False if there is no room now."""
        ...

    def keep(self, sequence: Sequence, row: int, length: int) -> None:
        """Keep the memory of a sequence that leaves `row` and has `length` tokens in the cache.

        `move` or `free` follows.
        """
        ...

    def free(self, sequence: Sequence) -> None: ...

    def settle(self, sequences: list[Sequence], row: int) -> None:
        """Bring the reused prefixes of these sequences to the rows from `row` on, in order."""
        ...

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

    def weights_may_change(self) -> None:
        """Forget what was derived from the weights: they may change in place while it is idle."""
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
    if (
        weights.head.device.type == "cuda"
        and head_dim(config) in HEAD_DIMS
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


class StepByStep(ABC):
    """Base of the synchronous backends: a burst is one step, complete when `decode` returns.

    Every slot owns the memory of a sequence of maximum length, a row of the cache.
    """

    ahead = 0
    prefill_tokens = 1 << 62
    admit_divisor = 8
    kept_in_slots = True

    def __init__(self, slots: int) -> None:
        self._rows = KeptRows(slots)

    def kv_used(self, kept: list[Sequence]) -> None:
        return None

    def steps(self, rows: int, brief: bool) -> int:
        return 1

    def reserve(self, sequence: Sequence, source: Sequence | None) -> bool:
        if self._rows.full:
            return False
        self._rows.held += 1
        return True

    def reuse(self, sequence: Sequence, kept: Sequence, length: int) -> bool:
        place = self._rows.take(kept)
        assert place is not None, "a kept context has a row"
        self._rows.put(sequence, replace(place, length=length))
        return True

    def grow(self, slots: Slots, positions: NDArray[np.int64]) -> bool:
        return True

    def keep(self, sequence: Sequence, row: int, length: int) -> None:
        self._rows.put(sequence, Place(row, self._column(length), length))

    def free(self, sequence: Sequence) -> None:
        self._rows.held -= 1
        self._rows.take(sequence)

    def settle(self, sequences: list[Sequence], row: int) -> None:
        live, copies = row + len(sequences), []
        for target, sequence in enumerate(sequences, row):
            if place := self._rows.take(sequence):
                column = self._column(len(sequence.context) - 1)
                copies.append(Copy(place, target, column))
        copies += self._rows.clear_rows(range(row, live), live)
        copy_at_once(copies, self._read, self._write)

    def move(self, slots: Slots, moves: list[tuple[int, int]]) -> None:
        copies = []
        for source, target in moves:
            length = int(slots.position[target])
            column = self._column(length)
            copies.append(Copy(Place(source, column, length), target, column))
        copies += self._rows.clear_rows((target for _, target in moves), len(slots.live))
        copy_at_once(copies, self._read, self._write)

    @abstractmethod
    def _column(self, length: int) -> int:
        """Return the first column of the context of a live row with `length` cached tokens."""

    @abstractmethod
    def _read(self, place: Place) -> Data:
        """Return views of the keys and values at this place."""

    @abstractmethod
    def _write(self, data: Data, copy: Copy) -> None:
        """Write keys and values to the target of a copy."""

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
        super().__init__(slots)
        self._weights = weights
        self._model = Decoder(config, weights, slots, max_length, kv_dtype)

    def prefill(self, chunks: list[PrefillChunk], row: int) -> None:
        """Prefill the longest chunks first; pad to the longest of a forward pass."""
        while chunks:
            length = chunks[0].stop - chunks[0].start
            n = max(1, min(len(chunks), PREFILL_TOKENS // length))
            tokens, starts = np.zeros((n, length), np.int64), np.zeros(n, np.int64)
            for index, chunk in enumerate(chunks[:n]):
                starts[index] = chunk.start
                tokens[index, : chunk.stop - chunk.start] = chunk.sequence.context[
                    chunk.start : chunk.stop
                ]
            for at in range(0, length, PREFILL_TOKENS):
                self._model.prefill(
                    self._tensor(tokens[:, at : at + PREFILL_TOKENS]), starts + at, row
                )
            chunks, row = chunks[n:], row + n

    def fork(self, source: Sequence, row: int, copies: list[Sequence], target: int) -> None:
        self._model.copy(row, target, len(copies), len(copies[0].context) - 1)

    def place(self, slots: Slots, row: int) -> None: ...

    def move(self, slots: Slots, moves: list[tuple[int, int]]) -> None:
        super().move(slots, moves)
        if not slots.live:  # while the engine is idle, weights may change and others need memory
            self.weights_may_change()

    def _column(self, length: int) -> int:
        return 0

    def _read(self, place: Place) -> Data:
        return [self._model.kv[:, place.row, :, :, : place.length]]

    @torch.inference_mode()
    def _write(self, data: Data, copy: Copy) -> None:
        self._model.kv[:, copy.row, :, :, : copy.source.length] = data[0]

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

    @contextmanager
    def changing_weights(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.weights_may_change()

    def weights_may_change(self) -> None:
        self._model.drop_packed()

    def sleep(self) -> None:
        self._model.drop_cache()
        self._model.drop_packed()

    def wake(self) -> None:
        self._model.make_cache()

    def _tensor(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self._weights.head.device)
