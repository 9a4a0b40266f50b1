"""The native engine's fast backend for NVIDIA GPUs.

The state of each row lives on the GPU and advances there. A decode step is one CUDA graph, from the
embedding to the sampled token. Bursts of steps run ahead of the host, which reads the tokens
through pinned memory.

A graph is captured once for each of a few batch sizes, on first use; its rows beyond the live ones
are idle on page 0. Small prefills are graphs too, with padding that goes to page 0, because the
host would need longer to start their kernels than the GPU to run them. All work is queued on one
stream, so a page or a row may be given to another sequence while the last burst that uses it still
runs.
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
from paceline.rollout.native import small_batch
from paceline.rollout.native.backend import PrefillChunk, Tokens
from paceline.rollout.native.forward import Cache, Forward
from paceline.rollout.native.kernels import PAGE, State
from paceline.rollout.native.pages import Pages
from paceline.rollout.native.prefill_timer import PrefillTimer
from paceline.rollout.native.slots import Sequence, Slots

# Maximum steps per burst, about 10 ms of work: enough for the host to keep up, and few wasted steps
# after a sequence has ended.
MAX_STEPS = 8
FORWARD_TOKENS = 8192  # maximum tokens per prefill pass, to bound its memory
# Numbers of tokens with a CUDA graph for prefill, and the tokens per sequence that it has room for.
PREFILL_SIZES = (128, 256, 512, 1024, 2048, 4096)
SEQUENCE_TOKENS = 16
COPIED_BYTES = 64 * 2**20  # at once, to bound the memory of the copy
FP8_CAPABILITY = (8, 9)  # the first GPUs that convert float8_e4m3fn
# Batch sizes with a CUDA graph; larger ones are multiples of 128.
SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Tokens of a burst that are being copied to the host."""

    host: Tensor  # [step, 2, row], pinned
    arrived: torch.cuda.Event

    def result(self) -> Tokens:
        self.arrived.synchronize()
        words = self.host.numpy()
        return words[:, 0], words[:, 1].view(np.float32)


class CudaBackend:
    ahead = 1
    prefill_tokens = FORWARD_TOKENS
    admit_divisor = 32
    kept_in_slots = False

    def __init__(
        self,
        config: PretrainedConfig,
        weights: DecoderWeights,
        slots: int,
        max_length: int,
        kv_memory_fraction: float,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.device = weights.head.device
        if kv_dtype is not None:
            _check_fp8("kv_cache_dtype", self.device)
        if weights.scales:
            _check_fp8("weight_dtype", self.device)
        self.slots, self.max_length, self.fraction = slots, max_length, kv_memory_fraction
        # Bursts are short, so they take priority over training on the same device.
        self.stream = torch.cuda.Stream(self.device, priority=-1)
        self._prefill_timer = PrefillTimer(self.stream)
        self._wait_for_caller()
        with self._on_stream():
            self.forward = Forward(config, weights, slots, max_length, kv_dtype)
            self.state = torch.zeros(len(State), slots, dtype=torch.int32, device=self.device)
            self.out = torch.zeros(MAX_STEPS, 2, slots, dtype=torch.int32, device=self.device)
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        # by number of tokens, each with its input
        self._prefills: dict[int, tuple[Tensor, torch.cuda.CUDAGraph]] = {}
        self.wake()
        self._capture_all()

    def wake(self) -> None:
        most = self.slots * self.forward.pages_each + 1
        free, _ = torch.cuda.mem_get_info(self.device)
        reusable = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(
            self.device
        )
        count = min(int((free + reusable) * self.fraction) // self.forward.page_bytes, most)
        if count < self.forward.pages_each + 1:
            raise RolloutError(
                f"rollout.kv_memory_fraction = {self.fraction:g}: of the {free / 2**30:.1f} GiB "
                f"free on {self.device}, the KV cache gets {max(count - 1, 0) * PAGE} tokens; "
                f"expected room for one sequence of {self.max_length} tokens. "
                "Raise it, shorten the sequences or free GPU memory"
            )
        with self._on_stream():
            self.cache = Cache.make(self.forward, count, self.slots, self.device)
            self.state.zero_()
        self.pages = Pages(count, PAGE)
        self._pool = torch.cuda.graph_pool_handle()
        self._table = np.zeros((self.slots, self.forward.pages_each), np.int32)
        self._held = np.zeros(self.slots, np.int64)  # number of pages of each row
        self._table_changed = False
        self._copied_pages: list[tuple[int, int]] = []  # as (source, target)
        self._live = 0  # number of rows that are decoded
        self._used = 0  # all rows from this one on are idle

    def kv_used(self, kept: list[Sequence]) -> float:
        return self.pages.used([sequence.pages for sequence in kept])

    def cache_bytes(self) -> int:
        return self.cache.kv.nbytes

    def sleep(self) -> None:
        self.stream.synchronize()
        self._graphs.clear()
        self._prefills.clear()
        del self.cache, self._pool
        torch.cuda.empty_cache()

    def steps(self, rows: int, brief: bool) -> int:
        if brief:
            return 4 if rows <= small_batch.MAX_ROWS else 2 if rows <= 64 else 1
        return MAX_STEPS if rows <= 128 else MAX_STEPS // 2

    def reserve(self, sequence: Sequence, source: Sequence | None) -> bool:
        shared = source.pages[: (len(sequence.context) - 1) // PAGE] if source else []
        if not self._take_pages(sequence, shared):
            return False
        self.pages.share(shared)
        return True

    def reuse(self, sequence: Sequence, kept: Sequence, length: int) -> bool:
        """Continue on the pages of `kept`.

        Other sequences may have the full pages of the context that `kept` had when it started, but
        `length` is at least that, so no page that is written from here on has another holder.
        """
        pages = self.pages.needed(length)
        if not self._take_pages(sequence, kept.pages[:pages]):
            return False
        self.pages.give_back(kept.pages[pages:])
        kept.pages = []
        return True

    def _take_pages(self, sequence: Sequence, pages: list[int]) -> bool:
        """Give a sequence these pages and as many new ones as its context needs."""
        needed = self.pages.needed(len(sequence.context)) - len(pages)
        # Each of these rows will soon need one more page.
        growing = int((self._held[: self._live] < self.forward.pages_each).sum())
        if self.pages.free < needed + growing:
            return False
        sequence.pages = pages + (self.pages.take(needed) or [])
        return True

    def grow(self, slots: Slots, positions: NDArray[np.int64]) -> bool:
        n = len(positions)
        wanted = (positions - 1) // PAGE + 1  # the last token's key is not written
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

    def keep(self, sequence: Sequence, row: int, length: int) -> None:
        """Keep the pages of these tokens. Bursts in flight may write behind them, but no later."""
        pages = self.pages.needed(length)
        self.pages.give_back(sequence.pages[pages:])
        del sequence.pages[pages:]

    def free(self, sequence: Sequence) -> None:
        self.pages.give_back(sequence.pages)
        sequence.pages = []

    def settle(self, sequences: list[Sequence], row: int) -> None: ...

    def prefill(self, chunks: list[PrefillChunk], row: int) -> None:
        """Prefill concatenated chunks in forward passes of at most FORWARD_TOKENS."""
        batch: list[PrefillChunk] = []
        room = FORWARD_TOKENS
        self._prefill_timer.settle()
        with self._on_stream(), self._prefill_timer:
            for chunk in chunks:
                start = chunk.start
                while start < chunk.stop:
                    stop = min(chunk.stop, start + room)
                    batch.append(PrefillChunk(chunk.sequence, start, stop))
                    room -= stop - start
                    start = stop
                    if room == 0:
                        self._prefill(batch)
                        batch, room = [], FORWARD_TOKENS
            if batch:
                self._prefill(batch)

    def fork(self, source: Sequence, row: int, copies: list[Sequence], target: int) -> None:
        """Copy the partly filled page for each of `copies`; `reserve` has shared the full pages.

        `place`, which follows, copies those of all prompts at once.
        """
        length = len(copies[0].context) - 1
        if length % PAGE:
            last = length // PAGE
            self._copied_pages += [(source.pages[last], copy.pages[last]) for copy in copies]

    def _copy_pages(self) -> None:
        """Copy pages for `fork`; no page is both a source and a target."""
        pairs, self._copied_pages = self._copied_pages, []
        kv = self.cache.kv
        kv = kv.view(torch.uint8) if kv.itemsize == 1 else kv  # not all kernels support FP8
        count = max(1, COPIED_BYTES // self.forward.page_bytes)
        for start in range(0, len(pairs), count):
            both = np.array(pairs[start : start + count], np.int32).T
            sources, targets = self._upload(np.ascontiguousarray(both)).long()
            kv.index_copy_(1, targets, kv.index_select(1, sources))

    def place(self, slots: Slots, row: int) -> None:
        n = len(slots.live)
        if n == row:
            return
        new = slice(row, n)
        words = np.zeros((len(State), n - row), np.int32)
        words[State.POSITION] = slots.position[new]
        words[State.LAST] = slots.last[new]
        words[State.LIMIT] = slots.limit[new]
        seeds = slots.seed[new].view(np.int32).reshape(-1, 2)
        words[State.SEED_LOW : State.SEED_HIGH + 1] = seeds.T
        words[State.TEMPERATURE] = slots.temperature[new].view(np.int32)
        words[State.TOP_K] = np.minimum(slots.top_k[new], 2**31 - 1)
        words[State.TOP_P] = slots.top_p[new].view(np.int32)
        with self._on_stream():
            self._copy_pages()
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
            with self._on_stream():
                both = self._upload(np.stack((sources, targets))).long()
                self.state.index_copy_(1, both[1], self.state.index_select(1, both[0]))
            self._table[targets], self._held[targets] = self._table[sources], self._held[sources]
        self._live = len(slots.live)
        self._table[self._live :] = 0
        self._table_changed = True

    def decode(self, slots: Slots, steps: int) -> PendingTokens:
        n = len(slots.live)
        truncated = bool(slots.top_k[:n].any() or (slots.top_p[:n] < 1).any())
        self._prefill_timer.settle()
        with self._on_stream():
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

    def weights_may_change(self) -> None: ...

    @contextmanager
    def _changing_weights(self) -> Iterator[None]:
        self._wait_for_caller()
        # Not in inference mode: the weights may come from a train engine that gathers them.
        with torch.cuda.stream(self.stream), torch.no_grad():
            yield
        # The caller must not change the source tensors before they have been read.
        torch.cuda.current_stream(self.device).wait_stream(self.stream)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        with torch.cuda.stream(self.stream), torch.inference_mode():
            yield

    def _wait_for_caller(self) -> None:
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

    def _capture_all(self) -> None:
        """Capture every graph that sampling without top-k and top-p needs, before the first step.

        Compiling kernels would otherwise make single steps several times as long. After `sleep`,
        graphs are captured on use.
        """
        with self._on_stream():
            for size in sorted({self._size(rows) for rows in range(1, self.slots + 1)}):
                self._graphs[size, False] = self._capture(size, False)
            most = self.slots * (self.max_length - 1)
            for size in PREFILL_SIZES:
                if size // 2 < most:
                    self._prefill_graph(size)

    def _capture(self, size: int, truncated: bool) -> torch.cuda.CUDAGraph:
        state = self.state.clone()
        # Compiles the kernels; it writes only to places that the captured step overwrites.
        self.forward.step(self.cache, self.state, self.out, size, truncated)
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
        tokens = np.concatenate(
            [
                np.array(chunk.sequence.context[chunk.start : chunk.stop], np.int32)
                for chunk in batch
            ]
        )
        positions = np.concatenate(
            [np.arange(chunk.start, chunk.stop, dtype=np.int32) for chunk in batch]
        )
        table = np.zeros((len(batch), self.forward.pages_each), np.int32)
        for index, chunk in enumerate(batch):
            table[index, : len(chunk.sequence.pages)] = chunk.sequence.pages
        owner = np.repeat(np.arange(len(batch)), [chunk.stop - chunk.start for chunk in batch])
        places = table[owner, positions // PAGE] * PAGE + positions % PAGE
        tiles, offset = [], 0
        for index, chunk in enumerate(batch):
            for start in range(chunk.start, chunk.stop, PAGE):
                count = min(PAGE, chunk.stop - start)
                tiles.append((index, offset, count, start))
                offset += count
        flat_tiles = np.array(tiles, np.int32).ravel()
        work = [tokens, positions, places.astype(np.int32), flat_tiles, table.ravel()]
        size = next((size for size in PREFILL_SIZES if size >= len(tokens)), None)
        if size is None or len(batch) > size // SEQUENCE_TOKENS:
            # Triton compiles kernels again for pointers that are not multiples of 16 bytes.
            count = -(-len(tokens) // 4) * 4
            lengths = [count, count, count, len(flat_tiles), table.size]
            self._prefill_tensors(self._upload(_padded(work, lengths)), lengths)
        else:
            flat, graph = self._prefill_graph(size)
            flat.copy_(self._upload(_padded(work, self._prefill_lengths(size))))
            graph.replay()

    def _prefill_tensors(self, flat: Tensor, lengths: list[int]) -> None:
        tokens, positions, places, tiles, table = flat.split(lengths)
        self.forward.prefill(
            self.cache,
            tokens,
            positions,
            places,
            tiles.view(-1, 4),
            table.view(-1, self.forward.pages_each),
        )

    def _prefill_graph(self, size: int) -> tuple[Tensor, torch.cuda.CUDAGraph]:
        """Return the graph of this size and its input. Padding alone writes to page 0 only."""
        if size not in self._prefills:
            lengths = self._prefill_lengths(size)
            flat = torch.zeros(sum(lengths), dtype=torch.int32, device=self.device)
            self._prefill_tensors(flat, lengths)  # compiles the kernels
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"
            ):
                self._prefill_tensors(flat, lengths)
            self._prefills[size] = flat, graph
        return self._prefills[size]

    def _prefill_lengths(self, size: int) -> list[int]:
        """Return the lengths of the parts of a prefill's input: see `Forward.prefill`."""
        most = size // SEQUENCE_TOKENS  # sequences
        return [size, size, size, 4 * (size // PAGE + most), most * self.forward.pages_each]


def _check_fp8(setting: str, device: torch.device) -> None:
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < FP8_CAPABILITY:
        raise RolloutError(
            f"rollout.{setting} = 'fp8': {torch.cuda.get_device_name(device)} has compute "
            f"capability {major}.{minor}; expected at least 8.9 (Ada, Hopper or newer). "
            "Remove the setting"
        )


def _padded(parts: list[NDArray[np.int32]], lengths: list[int]) -> NDArray[np.int32]:
    """Return the parts in one array, each followed by zeros up to its length."""
    result = np.zeros(sum(lengths), np.int32)
    for part, start in zip(parts, np.cumsum([0, *lengths[:-1]]), strict=True):
        result[start : start + len(part)] = part
    return result
