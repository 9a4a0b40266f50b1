"""The engine's fast path on NVIDIA GPUs. What a row is doing lives on the device and is advanced there; a decode step is one CUDA
graph, from the embedding to the drawn token, and bursts of steps run ahead of the host, which reads tokens through pinned memory.

Graphs are captured once for each of a few batch sizes, when first needed; the rows beyond the live ones stand still on page 0.
All work is queued on one stream, so a page or a row may be given to another sequence while the burst that last uses it still runs.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PretrainedConfig

from paceline.errors import RolloutError
from paceline.model.weights import DecoderWeights
from paceline.rollout.native import small
from paceline.rollout.native.backend import PrefillChunk, Tokens
from paceline.rollout.native.forward import Cache, Forward
from paceline.rollout.native.kernels import PAGE, State
from paceline.rollout.native.pages import Pages
from paceline.rollout.native.slots import Sequence, Slots

MOST_STEPS = 8  # of a burst: about 10 ms of work, so that the host keeps up and a stopped sequence does not run on for long
FORWARD_TOKENS = 8192  # prefilled in one forward pass: bounds its memory
SIZES = (
    1,
    2,
    4,
    8,
    16,
    32,
    48,
    64,
    96,
    128,
    192,
    256,
    320,
    384,
    448,
    512,
)  # of a batch that has a graph; above: multiples of 128


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Tokens of a burst on their way to the host."""

    host: Tensor  # [step, 2, row], pinned
    arrived: torch.cuda.Event

    def result(self) -> Tokens:
        self.arrived.synchronize()
        words = self.host.numpy()
        return words[:, 0], words[:, 1].view(np.float32)


class CudaBackend:
    ahead = 1
    prefill_tokens = FORWARD_TOKENS
    admit_share = 32

    def __init__(
        self,
        config: PretrainedConfig,
        weights: DecoderWeights,
        slots: int,
        max_length: int,
        kv_memory_fraction: float,
        brief: bool,
    ) -> None:
        self.device, self.brief = weights.head.device, brief
        self.slots, self.max_length, self.fraction = slots, max_length, kv_memory_fraction
        self.stream = torch.cuda.Stream(
            self.device, priority=-1
        )  # a burst is short: beside training it goes first
        self._after_others()
        with self._here():
            self.forward = Forward(config, weights, slots, max_length)
            self.state = torch.zeros(len(State), slots, dtype=torch.int32, device=self.device)
            self.out = torch.zeros(MOST_STEPS, 2, slots, dtype=torch.int32, device=self.device)
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self.wake()

    def wake(self) -> None:
        most = self.slots * self.forward.pages_each + 1
        free, _ = torch.cuda.mem_get_info(self.device)
        reusable = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(
            self.device
        )
        count = min(int((free + reusable) * self.fraction) // self.forward.page_bytes, most)
        if count < self.forward.pages_each + 1:
            raise RolloutError(
                f"keys and values: {self.fraction:.0%} of the {free / 2**30:.1f} GiB free on {self.device} hold {max(count - 1, 0) * PAGE} "
                f"tokens, fewer than one sequence of {self.max_length}; raise kv_memory_fraction, shorten max_length or free memory"
            )
        with self._here():
            self.cache = Cache.make(self.forward, count, self.slots, self.device)
            self.state.zero_()
        self.pages = Pages(count, PAGE)
        self._pool = torch.cuda.graph_pool_handle()
        self._table = np.zeros((self.slots, self.forward.pages_each), np.int32)
        self._held = np.zeros(self.slots, np.int64)  # pages of each row
        self._table_changed = False
        self._live = 0  # rows that are decoded
        self._used = 0  # rows from here on stand still

    def kv_used(self) -> float:
        return self.pages.used

    def cache_bytes(self) -> int:
        return self.cache.kv.nbytes

    def sleep(self) -> None:
        self.stream.synchronize()
        self._graphs.clear()
        del self.cache, self._pool
        torch.cuda.empty_cache()

    def steps(self, rows: int) -> int:
        if self.brief:
            return 4 if rows <= small.MOST_ROWS else 2 if rows <= 64 else 1
        return MOST_STEPS if rows <= 128 else MOST_STEPS // 2

    def room_for(self, sequence: Sequence, source: Sequence | None) -> bool:
        length = len(sequence.context) - 1
        shared = source.pages[: length // PAGE] if source else []
        needed = self.pages.needed(length + 1) - len(shared)
        growing = int(
            (self._held[: self._live] < self.forward.pages_each).sum()
        )  # those soon want one more each
        if self.pages.free < needed + growing:
            if self._live or not (taken := self.pages.take(needed)):
                return False
        else:
            taken = self.pages.take(needed) or []
        self.pages.share(shared)
        sequence.pages = shared + taken
        return True

    def grow(self, slots: Slots, positions: NDArray[np.int64]) -> bool:
        n = len(positions)
        wanted = (positions - 1) // PAGE + 1  # the key of the last token is not written yet
        rows = np.flatnonzero(wanted > self._held[:n])
        if not len(rows):
            return True
        taken = self.pages.take(int((wanted[rows] - self._held[rows]).sum()))
        if taken is None:
            return False
        for row in rows.tolist():
            pages = slots.live[row].pages
            while len(pages) < wanted[row]:
                self._table[row, len(pages)] = taken[-1]
                pages.append(taken.pop())
        self._held[rows] = wanted[rows]
        self._table_changed = True
        return True

    def free(self, sequence: Sequence) -> None:
        self.pages.give_back(sequence.pages)
        sequence.pages = []

    def prefill(self, pieces: list[PrefillChunk], row: int) -> None:
        """In forward passes of at most FORWARD_TOKENS, sequences end to end."""
        batch: list[PrefillChunk] = []
        room = FORWARD_TOKENS
        with self._here():
            for piece in pieces:
                start = piece.start
                while start < piece.stop:
                    stop = min(piece.stop, start + room)
                    batch.append(PrefillChunk(piece.sequence, start, stop))
                    room -= stop - start
                    start = stop
                    if room == 0:
                        self._prefill(batch)
                        batch, room = [], FORWARD_TOKENS
            if batch:
                self._prefill(batch)

    def fork(self, source: Sequence, row: int, copies: list[Sequence], target: int) -> None:
        """Whole pages are shared already; of the one that is filled in part each copy gets its own."""
        length = len(copies[0].context) - 1
        if length % PAGE:
            last = length // PAGE
            with self._here():
                targets = self._upload(
                    np.array([copy.pages[last] for copy in copies], np.int32)
                ).long()
                page = source.pages[last]
                self.cache.kv.index_copy_(
                    1,
                    targets,
                    self.cache.kv[:, page : page + 1].expand(-1, len(copies), -1, -1, -1, -1),
                )

    def place(self, slots: Slots, row: int) -> None:
        n = len(slots.live)
        if n == row:
            return
        new = slice(row, n)
        words = np.zeros((len(State), n - row), np.int32)
        words[State.POSITION], words[State.LAST], words[State.LIMIT] = (
            slots.position[new],
            slots.last[new],
            slots.limit[new],
        )
        words[State.SEED_LOW : State.SEED_HIGH + 1] = (
            slots.seed[new].view(np.int32).reshape(-1, 2).T
        )
        words[State.TEMPERATURE] = slots.temperature[new].view(np.int32)
        words[State.TOP_K], words[State.TOP_P] = (
            np.minimum(slots.top_k[new], 2**31 - 1),
            slots.top_p[new].view(np.int32),
        )
        with self._here():
            self.state[:, new] = self._upload(words)
        for index in range(row, n):
            pages = slots.live[index].pages
            self._table[index, : len(pages)] = pages
            self._held[index] = len(pages)
        self._table_changed = True
        self._live, self._used = n, max(self._used, n)

    def move(self, slots: Slots, moves: list[tuple[int, int]]) -> None:
        if moves:
            sources, targets = (np.array(rows, np.int32) for rows in zip(*moves, strict=True))
            with self._here():
                both = self._upload(np.stack((sources, targets))).long()
                self.state.index_copy_(1, both[1], self.state.index_select(1, both[0]))
            self._table[targets], self._held[targets] = self._table[sources], self._held[sources]
        self._live = len(slots.live)
        self._table[self._live :] = 0
        self._table_changed = True

    def decode(self, slots: Slots, steps: int) -> PendingTokens:
        n = len(slots.live)
        truncated = bool(slots.top_k[:n].any() or (slots.top_p[:n] < 1).any())
        with self._here():
            if self._used > n:
                self.state[:, n : self._used] = 0
                self._used = n
            if self._table_changed:
                self.cache.table.copy_(self._upload(self._table))
                self._table_changed = False
            self.cache.tick.zero_()
            self._replay(self._size(n), truncated, steps)
            return self._read(steps)

    def changing_weights(self) -> AbstractContextManager[object]:
        return self._changing_weights()

    @contextmanager
    def _changing_weights(self) -> Iterator[None]:
        self._after_others()
        with self._here():
            yield
        torch.cuda.current_stream(self.device).wait_stream(
            self.stream
        )  # the source must not change before it has been read

    @contextmanager
    def _here(self) -> Iterator[None]:
        with torch.cuda.stream(self.stream), torch.inference_mode():
            yield

    def _after_others(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def _size(self, rows: int) -> int:
        size = next((size for size in SIZES if size >= rows), -(-rows // 128) * 128)
        return min(size, self.slots)

    def _replay(self, size: int, truncated: bool, steps: int) -> None:
        graph = self._graphs.get((size, truncated))
        if graph is None:
            graph = self._graphs[size, truncated] = self._capture(size, truncated)
        for _ in range(steps):
            graph.replay()

    def _capture(self, size: int, truncated: bool) -> torch.cuda.CUDAGraph:
        state = self.state.clone()
        self.forward.step(
            self.cache, self.state, self.out, size, truncated
        )  # compiles kernels; writes only what the real step will
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"
        ):
            self.forward.step(self.cache, self.state, self.out, size, truncated)
        self.state.copy_(state)
        self.cache.tick.zero_()
        return graph

    def _read(self, steps: int) -> PendingTokens:
        host = torch.empty(steps, 2, self.slots, dtype=torch.int32, pin_memory=True)
        host.copy_(self.out[:steps], non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(self.stream)
        return PendingTokens(host, arrived)

    def _upload(self, array: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(array).pin_memory().to(self.device, non_blocking=True)

    def _prefill(self, batch: list[PrefillChunk]) -> None:
        rows = [piece.sequence.context[piece.start : piece.stop] for piece in batch]
        tokens = np.array([token for row in rows for token in row], np.int32)
        positions = np.concatenate(
            [np.arange(piece.start, piece.stop, dtype=np.int32) for piece in batch]
        )
        table = np.zeros((len(batch), self.forward.pages_each), np.int32)
        for index, piece in enumerate(batch):
            table[index, : len(piece.sequence.pages)] = piece.sequence.pages
        owner = np.repeat(np.arange(len(batch)), [piece.stop - piece.start for piece in batch])
        places = table[owner, positions // PAGE] * PAGE + positions % PAGE
        tiles, offset = [], 0
        for index, piece in enumerate(batch):
            for start in range(piece.start, piece.stop, PAGE):
                count = min(PAGE, piece.stop - start)
                tiles.append((index, offset, count, start))
                offset += count
        parts = (
            tokens,
            positions,
            places.astype(np.int32),
            np.array(tiles, np.int32).ravel(),
            table.ravel(),
        )
        flat = self._upload(np.concatenate(parts)).split([len(part) for part in parts])
        self.forward.prefill(
            self.cache, flat[0], flat[1], flat[2], flat[3].view(-1, 4), flat[4].view(len(batch), -1)
        )
