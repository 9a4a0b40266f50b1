"""Log-probs, advantages and versions of the tokens of a saved completion, and the characters each
one covers.

A reader can then color the text of a completion by token, without a tokenizer.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from paceline.types import Completion, FloatArray, Group

MAX_TOKENS = 512  # per completion; the text of later tokens has no details
REPLACEMENT = "\ufffd"  # decoders return it for a part of a character
MAX_PIECES = 200_000  # texts of tokens that are kept


class TokenDetails:
    """Details of tokens. `decode` turns tokens into text; it is called once per distinct token."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._pieces: dict[int, str] = {}

    def of(
        self, completion: Completion, text: str, advantages: FloatArray | None = None
    ) -> dict[str, Any]:
        """Return the details of a completion with this text; nothing if it cannot be divided."""
        tokens = completion.tokens[:MAX_TOKENS].tolist()
        counts = characters(text, self._texts(tokens))
        if counts is None or not tokens:
            return {}
        found = {} if advantages is None else {"advantages": _runs(_short(advantages))}
        return found | {
            "token_characters": counts,
            "logprobs": [round(value, 2) for value in completion.logprobs[:MAX_TOKENS].tolist()],
            "versions": _runs(completion.versions[:MAX_TOKENS].tolist()),
        }

    def _texts(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token. The first of those that share a character has it."""
        pieces = [self._piece(token) for token in tokens]
        shared = REPLACEMENT in "".join(pieces)
        return list(self._divided(tokens)) if shared else pieces

    def _divided(self, tokens: Sequence[int]) -> Iterator[str]:
        for partial, run in groupby(tokens, lambda token: REPLACEMENT in self._piece(token)):
            shared = list(run)
            if partial:
                yield self._decode(shared)
                yield from [""] * (len(shared) - 1)
            else:
                yield from map(self._piece, shared)

    def _piece(self, token: int) -> str:
        if len(self._pieces) > MAX_PIECES:
            self._pieces.clear()
        if token not in self._pieces:
            self._pieces[token] = self._decode([token])
        return self._pieces[token]


def turn_advantages(
    groups: Sequence[Group], values: FloatArray, wanted: Collection[int]
) -> dict[int, list[list[FloatArray]]]:
    """Return the advantages of each turn of each trajectory of the `wanted` groups, by number.

    `values`: those of all tokens of a batch, which has the groups in order of their numbers.
    """
    found: dict[int, list[list[FloatArray]]] = {seq: [] for seq in wanted}
    at = 0
    for group in sorted(groups, key=lambda group: group.seq):
        for trajectory in group.trajectories:
            turns = []
            for turn in trajectory.turns:
                begin = at + len(turn.prompt)
                at = begin + len(turn.completion)
                turns.append(values[begin:at])
            if group.seq in found:
                found[group.seq].append(turns)
    return found


def _runs(values: Iterable[float]) -> list[list[float]]:
    """Return runs of equal values as [value, tokens]."""
    return [[value, len(list(run))] for value, run in groupby(values)]


def _short(values: FloatArray) -> list[float]:
    return [float(f"{value:.3g}") for value in values[:MAX_TOKENS].tolist()]


def characters(text: str, pieces: Sequence[str]) -> list[int] | None:
    """Return the characters of `text` that each piece covers, or None if they do not match.

    Some tokenizers drop the space before a token that is decoded alone, and decoders may strip the
    ends of a text.
    """
    if "".join(pieces) == text:
        return list(map(len, pieces))
    at, counts = 0, []
    for piece in pieces:
        if at == len(text):
            counts.append(0)
            continue
        start = at
        if not text.startswith(piece, at):
            bare = piece.strip()
            while at < len(text) and text[at].isspace():
                at += 1
            if not text.startswith(bare, at):
                return None
            piece = bare
        at += len(piece)
        counts.append(at - start)
    return counts
