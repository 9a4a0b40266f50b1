"""Host-side state of the engine's slots: sampling settings, positions and generated tokens.

The arrays are indexed by slot, with the live ones dense at the front. A step reads and writes
slices, without a Python loop over sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.errors import RolloutError
from paceline.types import Completion, Finish, Request, empty_completion

NO_TOKEN = -1
# Tokens decoded beyond the length of a stop string, because a token may decode to nothing.
TAIL = 8
# Temperatures other than 0. Beyond them, scaled logits are not finite in float32.
LOWEST, HIGHEST = 1e-20, 1e20


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in flight. Its context is the prompt and the tokens generated before."""

    request: Request
    context: tuple[int, ...]
    key: int  # hash of the context; sequences with the same key share their prefill
    epoch: int = -1  # which weights computed its prefill
    arrival: int = -1  # order of slot assignment; the latest sequence is preempted first
    pages: list[int] = field(default_factory=list)  # its pages in a paged cache
    digest: int | None = None  # hash of the context by which later turns find it, see `kept.py`

    @classmethod
    def of(cls, request: Request) -> "Sequence":
        partial = () if request.partial is None else request.partial.tokens.tolist()
        context = (*request.prompt, *partial)
        return cls(request, context, hash(context))

    def partial(self, finish: Finish) -> Completion:
        """Return the tokens so far of a sequence without a slot."""
        made = self.request.partial
        if made is None:
            return empty_completion(finish)
        return Completion(made.tokens, made.logprobs, made.versions, finish)


class Slots:
    def __init__(self, count: int, max_length: int) -> None:
        self.count, self.max_length = count, max_length
        self.live: list[Sequence] = []
        self.arrival = np.zeros(count, np.int64)  # of the row's sequence
        self.position = np.zeros(count, np.int64)  # position of the last token
        self.ahead = np.zeros(count, np.int64)  # tokens in flight, not read yet
        self.limit = np.zeros(count, np.int64)  # highest allowed position
        self.seed = np.zeros(count, np.uint64)
        self.temperature = np.ones(count, np.float32)
        self.top_k = np.zeros(count, np.int64)
        self.top_p = np.ones(count, np.float32)
        self.stops = np.full((count, 1), NO_TOKEN, np.int32)
        self.stop_strings = np.zeros(count, np.bool_)  # whether the request has any
        self.last = np.zeros(count, np.int64)  # last token, the input of the next step
        self.tokens = np.zeros((count, max_length), np.int32)  # by position; generated ones only
        self.logprobs = np.zeros((count, max_length), np.float32)
        self.versions = np.zeros((count, max_length), np.int32)

    def add(self, sequence: Sequence) -> None:
        row, request = len(self.live), sequence.request
        sampling = request.sampling
        self.live.append(sequence)
        self.arrival[row] = sequence.arrival
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
        self.stop_strings[row] = bool(sampling.stop)
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
        """Append one token to each of these rows."""
        self.position[rows] += 1
        self.last[rows] = tokens
        at = (rows, self.position[rows])
        self.tokens[at], self.logprobs[at], self.versions[at] = tokens, logprobs, version

    def ended(
        self, rows: NDArray[np.int64], decode: Callable[[list[int]], str] | None
    ) -> dict[int, Finish]:
        """Return the finish reason of each of these rows whose sequence is complete."""
        ended = dict.fromkeys(rows[self.position[rows] >= self.limit[rows]].tolist(), Finish.LENGTH)
        stopped = (self.stops[rows] == self.last[rows, None]).any(1)
        ended.update(dict.fromkeys(rows[stopped].tolist(), Finish.STOP))
        for row in rows[self.stop_strings[rows]].tolist():
            request = self.live[row].request
            made = self.tokens[row, len(request.prompt) : self.position[row] + 1]
            if decode is not None and ends_in_stop(made, request.sampling.stop, decode):
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
        """Free these rows and fill the gaps with sequences from the end.

        Returns the moves as (source row, target row).
        """
        kept = len(self.live) - len(rows)
        gone = set(rows)
        targets = sorted(row for row in gone if row < kept)
        sources = [row for row in range(kept, len(self.live)) if row not in gone]
        by_row = (
            self.arrival, self.position, self.ahead, self.limit, self.seed, self.temperature,
            self.top_k, self.top_p, self.stops, self.stop_strings, self.last,
        )  # fmt: skip
        for array in by_row:
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
    """Return whether the text of the last tokens contains a stop string.

    A string of n bytes spans at most n tokens that decode to a nonempty text.
    """
    tail = max(len(stop.encode()) for stop in stops) + TAIL
    text = decode(tokens[-tail:].tolist())
    return any(stop in text for stop in stops)


def check_request(
    request: Request, duplicate: bool, max_length: int, vocabulary: int, can_decode: bool
) -> None:
    """Raise RolloutError if an engine cannot serve this request."""
    sampling, made = request.sampling, 0 if request.partial is None else len(request.partial)
    problem = None
    if duplicate:
        problem = "its ID is already in use; IDs must be unique among running and waiting requests"
    elif not request.prompt:
        problem = "its prompt is empty; expected at least one token"
    elif len(request.prompt) + max(made, 1) > max_length:
        problem = (
            f"{len(request.prompt)} prompt tokens and {max(made, 1)} new tokens exceed max_length "
            f"{max_length}, which is data.max_prompt_length + rollout.max_response_length; "
            "raise one of them or shorten the prompt"
        )
    elif min(request.prompt) < 0 or max(request.prompt) >= vocabulary:
        problem = (
            f"its prompt contains token IDs outside 0..{vocabulary - 1}; "
            "use the tokenizer that belongs to the model"
        )
    elif sampling.temperature and not LOWEST <= sampling.temperature <= HIGHEST:
        problem = (
            f"temperature = {sampling.temperature}; expected 0 or a number from {LOWEST:g} to "
            f"{HIGHEST:g}"
        )
    elif not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
        problem = f"expected top_p in (0, 1] and top_k >= 0; got {sampling}"
    elif sampling.stop and not can_decode:
        problem = "it has stop strings, but the engine was created without a `decode` function"
    if problem:
        raise RolloutError(f"request {request.id!r} cannot be generated: {problem}")


def already_ended(
    request: Request, max_length: int, decode: Callable[[list[int]], str] | None
) -> Finish | None:
    """Return the finish reason if the request's partial completion is already complete."""
    made = request.partial.tokens if request.partial is not None else np.zeros(0, np.int32)
    sampling = request.sampling
    if len(made) and (
        int(made[-1]) in sampling.stop_token_ids
        or (sampling.stop and decode and ends_in_stop(made, sampling.stop, decode))
    ):
        return Finish.STOP
    limit = min(sampling.max_new_tokens, max_length - len(request.prompt))
    return Finish.LENGTH if len(made) >= limit else None
