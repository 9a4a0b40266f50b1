"""What the engine knows on the host about each slot: how its sequence samples, where it stands, what it has produced.

Arrays over slots, live ones dense at the front: one step reads and writes slices, with no Python loop over sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.types import Completion, Finish, Request, empty_completion

NO_TOKEN = -1
TAIL = 8  # tokens decoded beyond the length of a stop string, since a token may decode to nothing


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way. `context`: the prompt and what was generated before."""

    request: Request
    context: tuple[int, ...]
    key: int  # hash of the context: sequences with the same one share their prefill
    epoch: int = -1  # which weights made its prefill
    arrival: int = -1  # the how manieth to get a slot
    pages: list[int] = field(default_factory=list)  # where a paged cache keeps it

    @classmethod
    def of(cls, request: Request) -> "Sequence":
        partial = () if request.partial is None else request.partial.tokens.tolist()
        context = (*request.prompt, *partial)
        return cls(request, context, hash(context))

    def partial(self, finish: Finish) -> Completion:
        """What there is of a sequence that has no slot."""
        made = self.request.partial
        return (
            empty_completion(finish)
            if made is None
            else Completion(made.tokens, made.logprobs, made.versions, finish)
        )


class Slots:
    def __init__(self, count: int, max_length: int) -> None:
        self.count, self.max_length = count, max_length
        self.live: list[Sequence] = []
        self.position = np.zeros(count, np.int64)  # of the last token
        self.ahead = np.zeros(count, np.int64)  # tokens being made that have not been read yet
        self.limit = np.zeros(count, np.int64)  # position of the last token allowed
        self.seed = np.zeros(count, np.uint64)
        self.temperature = np.ones(count, np.float32)
        self.top_k = np.zeros(count, np.int64)
        self.top_p = np.ones(count, np.float32)
        self.stops = np.full((count, 1), NO_TOKEN, np.int32)
        self.last = np.zeros(count, np.int64)  # the last token, which the next decode step eats
        self.tokens = np.zeros((count, max_length), np.int32)  # by position; only generated ones
        self.logprobs = np.zeros((count, max_length), np.float32)
        self.versions = np.zeros((count, max_length), np.int32)

    def add(self, sequence: Sequence) -> None:
        row, request = len(self.live), sequence.request
        sampling = request.sampling
        self.live.append(sequence)
        self.position[row] = len(sequence.context) - 1
        self.ahead[row] = 0
        self.last[row] = sequence.context[-1]
        self.limit[row] = min(len(request.prompt) + sampling.max_new_tokens, self.max_length) - 1
        self.seed[row] = request.seed % 2**64
        self.temperature[row], self.top_k[row], self.top_p[row] = (
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
        )
        stops = sampling.stop_token_ids
        if len(stops) > self.stops.shape[1]:
            wider = np.full((self.count, len(stops) - self.stops.shape[1]), NO_TOKEN, np.int32)
            self.stops = np.concatenate((self.stops, wider), 1)
        self.stops[row] = NO_TOKEN
        self.stops[row, : len(stops)] = stops
        if request.partial is not None:
            made = slice(len(request.prompt), len(sequence.context))
            self.tokens[row, made] = request.partial.tokens
            self.logprobs[row, made] = request.partial.logprobs
            self.versions[row, made] = request.partial.versions

    def record(
        self,
        rows: NDArray[np.int64],
        tokens: NDArray[np.int32],
        logprobs: NDArray[np.float32],
        version: int,
    ) -> None:
        """One new token for each of these rows."""
        self.position[rows] += 1
        self.last[rows] = tokens
        at = (rows, self.position[rows])
        self.tokens[at], self.logprobs[at], self.versions[at] = tokens, logprobs, version

    def ended(
        self, rows: NDArray[np.int64], decode: Callable[[list[int]], str] | None
    ) -> dict[int, Finish]:
        """Those of these rows whose sequence is complete, and why."""
        ended = dict.fromkeys(rows[self.position[rows] >= self.limit[rows]].tolist(), Finish.LENGTH)
        stopped = (self.stops[rows] == self.last[rows, None]).any(1)
        ended.update(dict.fromkeys(rows[stopped].tolist(), Finish.STOP))
        for row in rows.tolist() if decode is not None else ():
            sequence = self.live[row]
            if decode is not None and sequence.request.sampling.stop:
                made = self.tokens[row, len(sequence.request.prompt) : self.position[row] + 1]
                if ends_in_stop(made, sequence.request.sampling.stop, decode):
                    ended[row] = Finish.STOP
        return ended

    def completion(self, row: int, finish: Finish) -> Completion:
        made = slice(len(self.live[row].request.prompt), int(self.position[row]) + 1)
        return Completion(
            self.tokens[row, made].copy(),
            self.logprobs[row, made].copy(),
            self.versions[row, made].copy(),
            finish,
        )

    def remove(self, rows: list[int]) -> list[tuple[int, int]]:
        """Free these rows and close the gaps with sequences from the end; returns which row went where."""
        kept = len(self.live) - len(rows)
        gone = set(rows)
        targets = sorted(row for row in gone if row < kept)
        sources = [row for row in range(kept, len(self.live)) if row not in gone]
        for array in (
            self.position,
            self.ahead,
            self.limit,
            self.seed,
            self.temperature,
            self.top_k,
            self.top_p,
            self.stops,
            self.last,
        ):
            array[targets] = array[sources]
        for source, target in zip(sources, targets, strict=True):
            self.live[target] = self.live[source]
            made = slice(0, int(self.position[target]) + 1)
            for history in (self.tokens, self.logprobs, self.versions):
                history[target, made] = history[source, made]
        del self.live[kept:]
        return list(zip(sources, targets, strict=True))


def ends_in_stop(
    tokens: NDArray[np.int32], stops: tuple[str, ...], decode: Callable[[list[int]], str]
) -> bool:
    """Does the text of the last tokens hold a stop string? A string of n bytes spans at most n tokens that decode to something."""
    tail = max(len(stop.encode()) for stop in stops) + TAIL
    text = decode(tokens[-tail:].tolist())
    return any(stop in text for stop in stops)


def refusal(
    request: Request, taken: bool, max_length: int, vocabulary: int, can_decode: bool
) -> str | None:
    """Why an engine cannot generate this, if so."""
    sampling, made = request.sampling, 0 if request.partial is None else len(request.partial)
    if taken:
        return "its id is already in use; ids must be unique among running and waiting requests"
    if not request.prompt:
        return "its prompt is empty; at least one token is needed"
    if len(request.prompt) + max(made, 1) > max_length:
        return (
            f"{len(request.prompt)} prompt and {max(made, 1)} new tokens do not fit into max_length {max_length}, which is "
            "data.max_prompt_length + rollout.max_response_length; raise one of them or shorten the prompt"
        )
    if min(request.prompt) < 0 or max(request.prompt) >= vocabulary:
        return f"its prompt has token ids outside 0..{vocabulary - 1}; is the tokenizer the model's own?"
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
        return f"temperature must be >= 0, top_p in (0, 1], top_k >= 0; got {sampling}"
    if sampling.stop and not can_decode:
        return "it has stop strings, but the engine was made without a `decode` function"
    return None


def already_ended(
    request: Request, max_length: int, decode: Callable[[list[int]], str] | None
) -> Finish | None:
    """Why a request needs no more tokens, if so: its partial answer is complete."""
    made = request.partial.tokens if request.partial is not None else np.zeros(0, np.int32)
    sampling = request.sampling
    if len(made) and (
        int(made[-1]) in sampling.stop_token_ids
        or (sampling.stop and decode and ends_in_stop(made, sampling.stop, decode))
    ):
        return Finish.STOP
    return (
        Finish.LENGTH
        if len(made) >= min(sampling.max_new_tokens, max_length - len(request.prompt))
        else None
    )
