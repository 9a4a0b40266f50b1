"""Packing of rows: which tokens of a batch go through the model, and the cut into micro-batches.

Only tokens that lead to a trained token are fed: a row ends one token before its last trained one,
because the hidden state at t - 1 predicts token t. Linear layers see packed tokens without padding.
A prompt that several rows of a micro-batch share goes through them once; only attention sees it
once per row.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import DataError
from paceline.types import Batch

PER_TOKEN = (
    "tokens",
    "mask",
    "logprobs",
    "versions",
    "advantages",
    "returns",
    "values",
    "ref_logprobs",
    "token_rewards",
)
TOKEN_BYTES = 4  # of Batch.tokens
THREAD_TOKENS = 256  # with fewer per thread, one thread is faster


@dataclass(frozen=True, slots=True)
class Varlen:
    """Concatenated rows for attention on a GPU. A row's queries are its own tokens; its keys
    include the shared prompt."""

    queries: Tensor  # [rows + 1] int32, where the queries of each row start
    keys: Tensor  # [rows + 1] int32, where the keys of each row start
    longest_query: int
    longest_key: int
    source: Tensor | None  # the packed token of each key; None: no row shares any


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Mapping between packed tokens and the padded [rows, longest] rectangle of their rows."""

    rows: int
    longest: int
    # [rows * longest] the packed token in each slot; arbitrary beyond the end of a row.
    spread: Tensor
    slots: Tensor  # [T] row * longest + position, in the first row with the token
    varlen: Varlen | None = None  # the same without padding, for a GPU


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass: T input tokens, of which M positions predict a trained token."""

    input_ids: Tensor  # [1, T]
    position_ids: Tensor  # [1, T] restart at each row
    layout: RowLayout
    rows: Tensor  # [M] which row of the layout
    predict: Tensor  # [M] input positions that predict a trained token
    targets: Tensor  # [M] that token
    flat: NDArray[np.int64]  # [M] its index in the batch


def select_rows(batch: Batch, rows: NDArray[np.int64]) -> Batch:
    """Return the batch with only these rows, in this order."""
    offsets = batch.offsets
    flat = np.concatenate([np.arange(offsets[r], offsets[r + 1]) for r in rows])
    present = {
        f.name: value for f in fields(batch) if (value := getattr(batch, f.name)) is not None
    }
    return Batch(
        **{name: value[flat if name in PER_TOKEN else rows] for name, value in present.items()}
    )


def trained_lengths(batch: Batch) -> NDArray[np.int64]:
    """Return [R] how many tokens of each row are fed; 0 for a row without trained tokens."""
    offsets = batch.offsets[:-1]
    if (batch.mask[offsets[batch.lengths > 0]]).any():
        raise DataError(
            "the first token of a row is marked as trained, but no token precedes it; clear its "
            "mask"
        )
    position = np.arange(batch.num_tokens) - np.repeat(offsets, batch.lengths)
    needed = np.zeros(batch.num_rows, np.int64)
    np.maximum.at(
        needed,
        np.repeat(np.arange(batch.num_rows), batch.lengths),
        np.where(batch.mask, position, 0),
    )
    return needed


def micro_batches(
    batch: Batch, limit: int, device: torch.device, threads: int = 1
) -> Iterator[MicroBatch]:
    """Cut a batch into micro-batches of at most `limit` tokens, padding included.

    A longer row is a micro-batch alone. Rows of similar length go together, to keep padding low.
    All micro-batches have about the same size, and there are enough for all threads unless they
    would be too small.
    """
    needed = trained_lengths(batch)
    order = np.argsort(-needed, kind="stable")
    order = order[needed[order] > 0]
    lengths = needed[order].tolist()
    threads = max(1, min(threads, sum(lengths) // THREAD_TOKENS))
    start = 0
    for count in cut_evenly(lengths, limit, -(-len(cut_rows(lengths, limit)) // threads) * threads):
        yield micro_batch(batch, order[start : start + count], needed, device)
        start += count


def cut_evenly(lengths: list[int], limit: int, most: int) -> list[int]:
    """Return rows per micro-batch for the smallest limit that gives at most `most` of them.

    `lengths` are sorted, longest first.
    """
    low, high = 0, limit  # `high` always suffices
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if len(cut_rows(lengths, middle)) <= most else (middle, high)
    return cut_rows(lengths, high)


def cut_rows(lengths: list[int], limit: int) -> list[int]:
    """Return rows per micro-batch of at most `limit` tokens, padding included."""
    counts, start = [], 0
    while start < len(lengths):
        counts.append(min(len(lengths) - start, max(1, limit // lengths[start])))
        start += counts[-1]
    return counts


def grouped_micro_batches(batch: Batch, limit: int, device: torch.device) -> Iterator[MicroBatch]:
    """Cut a batch into micro-batches of at most `limit` tokens, for attention without padding.

    Rows stay in order, so that rows of one prompt share it. A longer row is a micro-batch alone.
    """
    needed = trained_lengths(batch)
    rows = np.flatnonzero(needed)
    prompts = [prompt.tobytes() for prompt in _prompts(batch, rows)]
    lengths = needed[rows].tolist()
    counts = cut_shared(lengths, prompts, limit)
    low, high = 0, limit  # find a small limit with the same number of micro-batches
    while len(counts) > 1 and high - low > max(1, limit // 64):
        middle = (low + high) // 2
        smaller = cut_shared(lengths, prompts, middle)
        if len(smaller) <= len(counts):
            high, counts = middle, smaller
        else:
            low = middle
    start = 0
    for size in counts:
        yield micro_batch(batch, rows[start : start + size], needed, device)
        start += size


def _prompts(batch: Batch, rows: NDArray[np.int64]) -> list[NDArray[np.int32]]:
    """Return the tokens of each row before its first trained one; every row has one."""
    starts, trained = batch.offsets[rows], np.flatnonzero(batch.mask)
    ends = trained[np.searchsorted(trained, starts)]
    return [batch.tokens[start:end] for start, end in zip(starts, ends, strict=True)]


def cut_shared(lengths: list[int], prompts: list[bytes], limit: int) -> list[int]:
    """Return rows per micro-batch of at most `limit` tokens, with each prompt counted once."""
    counts: list[int] = []
    fed, seen = limit, set[bytes]()
    for length, prompt in zip(lengths, prompts, strict=True):
        new = length - (len(prompt) // TOKEN_BYTES if prompt in seen else 0)
        if not counts or fed + new > limit:
            counts.append(0)
            fed, seen, new = 0, set(), length
        counts[-1] += 1
        fed += new
        seen.add(prompt)
    return counts


def micro_batch(
    batch: Batch, rows: NDArray[np.int64], needed: NDArray[np.int64], device: torch.device
) -> MicroBatch:
    """Build one forward pass of these rows, of which `needed` tokens each are fed."""
    fed = needed[rows]
    shared, first = _shared_prompts(batch, rows)
    own = fed - shared  # tokens that no earlier row has
    before = np.cumsum(own) - own  # packed tokens before each row
    position = np.arange(int(fed.max()))[None, :]
    inside, reused = position < fed[:, None], position < shared[:, None]
    spread = position + np.where(reused, before[first, None], (before - shared)[:, None])
    spread[~inside] = 0
    index = batch.offsets[rows, None] + position
    flat, slot = index[inside & ~reused], np.flatnonzero(inside & ~reused)
    following = np.where(inside, index + 1, 0)
    trained_row, trained_position = np.nonzero(inside & batch.mask[following])
    trained = following[trained_row, trained_position]

    def to_device(array: NDArray[np.int64]) -> Tensor:
        return upload(array, device)

    varlen = None
    if device.type == "cuda":
        varlen = make_varlen(own, fed, spread[inside], device)
    longest = position.size
    return MicroBatch(
        input_ids=to_device(batch.tokens[flat].astype(np.int64))[None],
        position_ids=to_device(slot % longest)[None],
        layout=RowLayout(len(rows), longest, to_device(spread.ravel()), to_device(slot), varlen),
        rows=to_device(trained_row),
        predict=to_device(spread[trained_row, trained_position]),
        targets=to_device(batch.tokens[trained].astype(np.int64)),
        flat=trained,
    )


def _shared_prompts(
    batch: Batch, rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return how many tokens each row shares with an earlier one, and which: itself if none."""
    owner: dict[bytes, int] = {}
    prompts = _prompts(batch, rows)
    first = np.array([owner.setdefault(p.tobytes(), i) for i, p in enumerate(prompts)])
    own = first == np.arange(len(rows))
    return np.where(own, 0, [len(prompt) for prompt in prompts]), first


def make_varlen(
    own: NDArray[np.int64],
    lengths: NDArray[np.int64],
    source: NDArray[np.int64],
    device: torch.device,
) -> Varlen:
    """Build the layout. `own`: tokens of each row that no earlier row has; `lengths`: all of its
    tokens; `source`: the packed tokens of all rows, one row after the other."""
    shared = bool((own < lengths).any())
    source = source[np.repeat(own > 0, lengths)]  # a row without own tokens has no queries
    own, lengths = own[own > 0], lengths[own > 0]
    starts = [
        np.concatenate([np.zeros(1, np.int64), np.cumsum(part)]).astype(np.int32)
        for part in (own, lengths)
    ]
    queries, keys = (upload(part, device) for part in starts)
    return Varlen(
        queries,
        keys,
        int(own.max()),
        int(lengths.max()),
        upload(source, device) if shared else None,
    )


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy to a device; to a GPU through pinned memory, so that the copy does not block."""
    tensor = torch.from_numpy(array)
    return (
        tensor.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else tensor.to(device)
    )


def empty_micro_batch(device: torch.device) -> MicroBatch:
    """Return a pass without trained tokens, for a rank without rows while others have some."""
    one, none = (
        torch.zeros(1, dtype=torch.int64, device=device),
        torch.zeros(0, dtype=torch.int64, device=device),
    )
    bounds = torch.tensor([0, 1], dtype=torch.int32, device=device)
    layout = RowLayout(
        1, 1, one, one, Varlen(bounds, bounds, 1, 1, None) if device.type == "cuda" else None
    )
    return MicroBatch(
        one[None],
        one[None],
        layout,
        rows=none,
        predict=none,
        targets=none,
        flat=np.zeros(0, np.int64),
    )
