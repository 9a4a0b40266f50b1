"""Backend that generates with the Hugging Face module, for models without a built-in forward pass.

It is slower but architecture-independent: it serves every causal language model whose only state
is a KV cache. Rows are padded on the left, so all live sequences write their next key and value to
the same column of the cache; each model gets an attention mask and, if it takes them, positions.
At startup, the backend compares its log-probs with a plain forward pass.
"""

import inspect
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache

from paceline.errors import ModelError
from paceline.model.engine_weights import ModuleWeights
from paceline.model.loading import EXACT, ROUNDED, model_body
from paceline.model.support import ALTERNATIVE
from paceline.rollout.native.backend import PREFILL_TOKENS, CompletedBurst, PrefillChunk, StepByStep
from paceline.rollout.native.rows import Copy, Data, Place
from paceline.rollout.native.sampling import row_keys, sample
from paceline.rollout.native.slots import Sequence, Slots

# Columns beyond the longest sequence: once they are used up, all rows move back to the left.
SLACK = 64


class SlotCache(Cache):  # type: ignore[misc]  # transformers exports no types
    """KV cache of all slots, [slot, head, column, size] per layer, allocated on first use.

    A forward pass covers the rows from `row` on and the columns from `first` on, of which `seen`
    are filled.
    """

    def __init__(self, slots: int, columns: int) -> None:
        super().__init__(layers=[])
        self.slots, self.columns = slots, columns
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.row = self.first = self.seen = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx not in self.kept:
            self.kept[layer_idx] = self._empty(key_states), self._empty(value_states)
        n, stop = len(key_states), self.first + self.seen + key_states.shape[2]
        rows = slice(self.row, self.row + n)
        for kept, new in zip(self.kept[layer_idx], (key_states, value_states), strict=True):
            kept[rows, :, stop - new.shape[2] : stop] = new
        keys, values = (kept[rows, :, self.first : stop] for kept in self.kept[layer_idx])
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.seen + query_length, 0

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for pair in self.kept.values() for tensor in pair]

    def copy(self, rows: slice, start: int, length: int, target: slice, to: int) -> None:
        """Copy columns start..start+length of `rows` to the columns from `to` on of `target`.

        One source row may be copied to several target rows.
        """
        for kept in self.tensors:
            kept[target, :, to : to + length] = kept[rows, :, start : start + length].clone()

    def _empty(self, states: Tensor) -> Tensor:
        return states.new_zeros(self.slots, states.shape[1], self.columns, states.shape[3])


class ModuleBackend(StepByStep):
    """Backend on a Hugging Face module. All live rows write next to column `_end`."""

    def __init__(self, weights: ModuleWeights, slots: int, max_length: int) -> None:
        super().__init__(slots)
        self._weights, self._model, self._body = weights, weights.module, model_body(weights.module)
        self._longest = self._end = max_length
        self._cache = SlotCache(slots, max_length + SLACK)
        self._length = np.zeros(slots, np.int64)  # cached tokens of each row
        self._model.eval()
        self._positions = "position_ids" in inspect.signature(self._model.forward).parameters
        self._check(min(slots, 2), max_length)

    def prefill(self, chunks: list[PrefillChunk], row: int) -> None:
        """Prefill the longest chunks first; a forward pass has as many tokens of each row.

        Shorter chunks are padded, or preceded by tokens of the context that are in the cache.
        """
        while chunks:
            tokens = chunks[0].stop - chunks[0].start
            n = max(1, min(len(chunks), PREFILL_TOKENS // tokens))
            contexts = [chunk.sequence.context[: chunk.stop] for chunk in chunks[:n]]
            self._prefill(contexts, tokens, row)
            chunks, row = chunks[n:], row + n

    def _prefill(self, contexts: list[tuple[int, ...]], count: int, row: int) -> None:
        """Prefill the last `count` tokens of these contexts."""
        lengths = np.array([len(context) for context in contexts])
        width = int(lengths.max())
        tokens = np.zeros((len(contexts), width), np.int64)
        for index, context in enumerate(contexts):
            tokens[index, width - len(context) :] = context
        self._length[row : row + len(contexts)] = lengths
        for start in range(width - count, width, PREFILL_TOKENS):
            self._forward(
                self._body,
                tokens[:, start : start + PREFILL_TOKENS],
                width - lengths,
                row,
                self._end - width,
                start,
            )

    def settle(self, sequences: list[Sequence], row: int) -> None:
        super().settle(sequences, row)
        lengths = [len(sequence.context) - 1 for sequence in sequences]
        self._length[row : row + len(sequences)] = lengths

    def fork(self, source: Sequence, row: int, copies: list[Sequence], target: int) -> None:
        length, start = len(copies[0].context) - 1, self._end - int(self._length[row])
        self._cache.copy(
            slice(row, row + 1),
            start,
            length,
            slice(target, target + len(copies)),
            self._end - length,
        )

    def place(self, slots: Slots, row: int) -> None:
        self._length[row : len(slots.live)] = slots.position[row : len(slots.live)]

    def move(self, slots: Slots, moves: list[tuple[int, int]]) -> None:
        super().move(slots, moves)
        for source, target in moves:
            self._length[target] = self._length[source]

    def _column(self, length: int) -> int:
        return self._end - length

    def _read(self, place: Place) -> Data:
        columns = slice(place.column, place.column + place.length)
        return [tensor[place.row, :, columns] for tensor in self._cache.tensors]

    def _write(self, data: Data, copy: Copy) -> None:
        columns = slice(copy.column, copy.column + copy.source.length)
        for tensor, values in zip(self._cache.tensors, data, strict=True):
            tensor[copy.row, :, columns] = values

    def decode(self, slots: Slots, steps: int) -> CompletedBurst:
        n = len(slots.live)
        logits = self._decode(slots.last[:n])
        keys = row_keys(slots.seed[:n], slots.position[:n] + 1)
        tokens, logprobs = sample(
            logits, keys, slots.temperature[:n], slots.top_k[:n], slots.top_p[:n]
        )
        return CompletedBurst(tokens[None], logprobs[None])

    def _decode(self, tokens: NDArray[np.int64]) -> Tensor:
        """Append one token to each of the first rows and return the logits that follow."""
        lengths, rows = self._length[: len(tokens)], slice(0, len(tokens))
        width = int(lengths.max())
        if self._end == self._cache.columns:
            self._cache.copy(rows, self._end - width, width, rows, self._longest - width)
            self._end = self._longest
        output = self._forward(
            self._model, tokens[:, None], width - lengths, 0, self._end - width, width
        )
        lengths += 1
        self._end += 1
        return output.logits[:, -1]

    def weights_may_change(self) -> None: ...

    def cache_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._cache.tensors)

    def sleep(self) -> None:
        self._cache.kept.clear()

    def wake(self) -> None: ...

    # Not inference mode, because training may reuse tensors that a module caches in this pass.
    @torch.no_grad()
    def _forward(
        self,
        module: Any,
        tokens: NDArray[np.int64],
        padding: NDArray[np.int64],
        row: int,
        first: int,
        seen: int,
    ) -> Any:
        """Run the module on `tokens` [n, t], in columns first + seen.. of the rows from `row` on.

        The first `padding` columns of each row, counted from `first`, are masked.
        """
        cache, columns = self._cache, np.arange(seen + tokens.shape[1]) - padding[:, None]
        cache.row, cache.first, cache.seen = row, first, seen
        positions = (
            {"position_ids": self._tensor(columns[:, seen:].clip(0))} if self._positions else {}
        )
        return module(
            input_ids=self._tensor(tokens),
            attention_mask=self._tensor((columns >= 0).astype(np.int64)),
            past_key_values=cache,
            use_cache=True,
            **positions,
        )

    def _tensor(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._weights.device)

    def _check(self, rows: int, max_length: int) -> None:
        """Compare cached decoding of rows of different lengths with plain forward passes.

        A model with other state than the KV cache, or without causal attention, would generate
        from a different distribution than the one it is trained on.
        """
        lengths = [min(6 - 3 * row, max_length) for row in range(rows)]
        tokens = [
            tuple((7 * i + row) % self._weights.vocabulary for i in range(max(3, length)))
            for row, length in enumerate(lengths)
        ]
        try:
            self._prefill([row[:-2] for row in tokens], max(map(len, tokens)) - 2, 0)
            self._decode(np.array([row[-2] for row in tokens]))
            found = self._decode(np.array([row[-1] for row in tokens])).float().log_softmax(-1)
            with torch.no_grad():
                inputs = [self._tensor(np.array([row])) for row in tokens]
                logits = [
                    self._model(input_ids=ids, use_cache=False).logits[0, -1] for ids in inputs
                ]
            plain = torch.stack(logits).float().log_softmax(-1)
            gap = float(((found - plain).abs() / (1 + plain.abs())).mean())
        except Exception as error:  # an unknown architecture may raise anything
            raise ModelError(
                f"the native engine cannot run {type(self._model).__name__} ({error}); "
                f"{ALTERNATIVE}"
            ) from error
        if not gap <= (EXACT if logits[0].dtype == torch.float32 else ROUNDED):
            raise ModelError(
                f"the native engine cannot run {type(self._model).__name__}: with a KV cache, its "
                f"log-probs differ by {gap:.2g} (mean relative difference) from a plain forward "
                f"pass; {ALTERNATIVE}"
            )
        self._end = max_length
