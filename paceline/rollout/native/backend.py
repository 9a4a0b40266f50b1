"""What the engine needs from a device: a place for keys and values, prefill, and bursts of decode steps that may run ahead of the
host. The simple backend computes at once, on any device; `cuda.py` is the fast one for GPUs, `module.py` the one for all other models.
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
from paceline.rollout.native.sampling import draw, row_keys
from paceline.rollout.native.slots import Sequence, Slots

PREFILL_TOKENS = 1024  # per forward pass: bounds its memory
Tokens = tuple[NDArray[np.int32], NDArray[np.float32]]  # tokens and log-probs, both [step, row]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens start..stop of a sequence's context, to be put into the cache."""

    sequence: Sequence
    start: int
    stop: int


class Burst(Protocol):
    """Decode steps under way."""

    def result(self) -> Tokens:
        """Waits for them. What a row makes beyond its limit means nothing."""
        ...


class Backend(Protocol):
    ahead: int  # bursts that are started before the first one is looked at
    prefill_tokens: (
        int  # of prompts per step while sequences are decoding: more would hold those up
    )
    admit_share: int  # new sequences wait until this part of the slots is free: prefilling few costs nearly as much as many

    def kv_used(self) -> float | None:
        """Share of the memory for keys and values that is taken; None where every slot has its own."""
        ...

    def steps(self, rows: int) -> int:
        """Tokens a burst makes for each row."""
        ...

    def room_for(self, sequence: Sequence, source: Sequence | None) -> bool:
        """Reserve what the context of a new sequence needs, the common part held together with `source`. False: no room now."""
        ...

    def grow(self, slots: Slots, positions: NDArray[np.int64]) -> bool:
        """Reserve what live rows need to reach these positions. False: no room now."""
        ...

    def free(self, sequence: Sequence) -> None: ...

    def prefill(self, pieces: list[PrefillChunk], row: int) -> None:
        """Compute keys and values; whole contexts go to rows from `row` on, in order."""
        ...

    def fork(self, source: Sequence, row: int, copies: list[Sequence], target: int) -> None:
        """Give `copies`, in rows from `target` on, the context of `source`, which is in `row`."""
        ...

    def place(self, slots: Slots, row: int) -> None:
        """The rows from `row` on are new: their settings stand in `slots`."""
        ...

    def move(self, slots: Slots, moves: list[tuple[int, int]]) -> None:
        """Rows have been moved (source, target) in `slots`, the rest removed."""
        ...

    def decode(self, slots: Slots, steps: int) -> Burst: ...

    def changing_weights(self) -> AbstractContextManager[object]:
        """Around a change of the weights: bursts started before still see the old ones."""
        ...

    def cache_bytes(self) -> int:
        """Held by keys and values while awake."""
        ...

    def sleep(self) -> None:
        """Give memory back. No sequence holds anything."""
        ...

    def wake(self) -> None: ...


def choose_backend(
    config: PretrainedConfig, weights: EngineWeights, slots: int, max_length: int, kv_memory_fraction: float, brief: bool
) -> "Backend":  # fmt: skip
    if not isinstance(weights, DecoderWeights):
        from paceline.rollout.native.module import ModuleBackend

        assert isinstance(weights, ModuleWeights), "there are two kinds of weights"
        return ModuleBackend(weights, slots, max_length)
    window = sliding_window(config)
    if window is not None and max_length > window:
        raise ModelError(
            f"the model sees only {window} tokens back (sliding window): max_length {max_length} must not be above that"
        )
    dim = head_dim(config)
    if (
        weights.head.device.type == "cuda"
        and dim in (16, 32, 64, 128, 256)
        and importlib.util.find_spec("triton")
    ):
        from paceline.rollout.native.cuda import CudaBackend

        return CudaBackend(config, weights, slots, max_length, kv_memory_fraction, brief)
    return SimpleBackend(config, weights, slots, max_length)


@dataclass(frozen=True, slots=True)
class CompletedBurst:
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    def result(self) -> Tokens:
        return self.tokens, self.logprobs


class StepByStep:
    """Every slot owns its longest sequence's memory, and a burst is one step, done when `decode` returns."""

    ahead = 0
    prefill_tokens = 1 << 62
    admit_share = 8

    def kv_used(self) -> None:
        return None

    def steps(self, rows: int) -> int:
        return 1

    def room_for(self, sequence: Sequence, source: Sequence | None) -> bool:
        return True

    def grow(self, slots: Slots, positions: NDArray[np.int64]) -> bool:
        return True

    def free(self, sequence: Sequence) -> None: ...

    def changing_weights(self) -> AbstractContextManager[object]:
        return nullcontext()


class SimpleBackend(StepByStep):
    """By our own forward pass, on any device."""

    def __init__(
        self, config: PretrainedConfig, weights: DecoderWeights, slots: int, max_length: int
    ) -> None:
        self._weights = weights
        self._model = Decoder(config, weights, slots, max_length)

    def prefill(self, pieces: list[PrefillChunk], row: int) -> None:
        """Longest first, padded to the longest of a forward pass."""
        while pieces:
            length = pieces[0].stop
            n = max(1, min(len(pieces), PREFILL_TOKENS // length))
            tokens = np.zeros((n, length), np.int64)
            for index, piece in enumerate(pieces[:n]):
                tokens[index, : piece.stop] = piece.sequence.context[: piece.stop]
            for start in range(0, length, PREFILL_TOKENS):
                self._model.prefill(
                    self._tensor(tokens[:, start : start + PREFILL_TOKENS]), start, row
                )
            pieces, row = pieces[n:], row + n

    def fork(self, source: Sequence, row: int, copies: list[Sequence], target: int) -> None:
        self._model.copy(row, target, len(copies), len(copies[0].context) - 1)

    def place(self, slots: Slots, row: int) -> None: ...

    def move(self, slots: Slots, moves: list[tuple[int, int]]) -> None:
        for source, target in moves:
            self._model.copy(source, target, 1, int(slots.position[target]))

    def decode(self, slots: Slots, steps: int) -> CompletedBurst:
        n = len(slots.live)
        positions = slots.position[:n]
        logits = self._model.decode(
            self._tensor(slots.last[:n]), self._tensor(positions), int(positions.max())
        )
        keys = row_keys(slots.seed[:n], positions + 1)
        tokens, logprobs = draw(
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
