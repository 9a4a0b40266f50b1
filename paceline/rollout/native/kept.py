"""Contexts of finished sequences whose KV cache is kept, so that a later turn can reuse it.

A later turn of a conversation begins with the tokens of an earlier one, which are found by hashes
of their prefixes and then compared token for token. A context can be reused up to two points: all
of it, or what the sequence had when it started, for chat templates that rewrite the last message.
"""

from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from paceline.rollout.native.slots import Sequence

MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that no power of it is 0


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """A finished sequence, which still holds its memory, and the tokens it generated."""

    sequence: Sequence
    generated: NDArray[np.int32]
    points: tuple[tuple[int, int], ...]  # (hash, number of tokens) of the prefixes it can give

    def begins(self, context: tuple[int, ...], tokens: int) -> bool:
        """Return whether `context` begins with the first `tokens` tokens of this one."""
        before = self.sequence.context
        generated = self.generated[: tokens - len(before)].tolist()
        return context[:tokens] == (*before, *generated)


class KeptContexts:
    def __init__(self, max_length: int) -> None:
        self._powers = np.multiply.accumulate(np.full(max_length, MULTIPLIER, np.uint64))
        self._kept: dict[Sequence, Kept] = {}  # the least recently used first
        self._by_hash: dict[int, dict[Sequence, Kept]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def oldest(self, count: int) -> list[Sequence]:
        """Return the sequences that have been kept longest; a reused one is no longer kept."""
        return list(islice(self._kept, count))

    def find(self, sequence: Sequence) -> tuple[Sequence, int] | None:
        """Return the kept sequence with the longest prefix of this context, and its tokens.

        The last token of a context is the input of the first decode step, so it is no part of it.
        """
        hashes = np.cumsum(self._terms(sequence.context, 0))
        sequence.digest = int(hashes[-1])
        found = self._by_hash.keys() & hashes[:-1].tolist() if self._kept else ()
        best: tuple[Sequence, int] | None = None
        for digest in found:
            same = self._by_hash[digest]
            kept = next(reversed(same.values()))
            tokens = dict(kept.points)[digest]
            if len(same) > 1 and tokens == len(kept.sequence.context):
                continue  # samples of one prompt: this may be the context of another conversation
            if (best is None or tokens > best[1]) and kept.begins(sequence.context, tokens):
                best = kept.sequence, tokens
        return best

    def add(self, sequence: Sequence, generated: NDArray[np.int32]) -> None:
        """Keep a sequence that generated these tokens since it started.

        The key of the last token is not in the cache.
        """
        if sequence.digest is None:
            sequence.digest = int(self._terms(sequence.context, 0).sum())
        started, cached = len(sequence.context), generated[:-1]
        whole = (sequence.digest + int(self._terms(cached, started).sum())) % 2**64
        points = ((sequence.digest, started), (whole, started + len(cached)))
        kept = Kept(sequence, generated, points)
        self._kept[sequence] = kept
        for digest, _ in points:
            self._by_hash.setdefault(digest, {})[sequence] = kept

    def remove(self, sequence: Sequence) -> None:
        for digest, _ in self._kept.pop(sequence).points:
            same = self._by_hash.get(digest, {})
            same.pop(sequence, None)
            if not same:
                self._by_hash.pop(digest, None)

    def _terms(self, tokens: tuple[int, ...] | NDArray[np.int32], start: int) -> NDArray[np.uint64]:
        """Return the terms of the hash of tokens at `start`.. A prefix has the sum of its terms."""
        numbers = np.asarray(tokens).astype(np.uint64) + np.uint64(1)
        return numbers * self._powers[start : start + len(numbers)]
