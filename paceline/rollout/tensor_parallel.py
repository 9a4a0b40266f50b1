"""Ranks of an engine that is larger than one device: one leads, the others follow.

Every rank has an engine with its shard of the weights, and a decode step is a collective operation
of all of them. The leader alone gets requests and decides when to step. It posts every operation to
a channel per follower before it performs it, and a follower performs what it receives.

Total order: the leader is one thread and a channel is first in, first out, so all ranks perform the
same operations in the same order, and the n-th collective operation of one rank meets the n-th of
the others. The leader waits for a follower only inside an operation that it has posted. A follower
that receives it waits for nothing else, so no rank waits forever.

In the ranks of a trainer there are also calls of the controller to the whole group: they reach the
inbox of every rank in the same order, but independently of the channel. `InOrder` puts them in the
order of the channel: the leader posts a marker before it performs such a call. A follower performs
what the leader posted before the marker, and nothing after it, until it has performed the call.
The leader serves its inbox between two steps, so every call gets its marker. What the leader posts
inside a call (`release`), a follower performs inside the same call.
"""

import os
import queue
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import RolloutError, SyncError
from paceline.model.loading import default_device
from paceline.remote.group import address_in_group
from paceline.remote.listener import Listener, connect
from paceline.rollout.shards import Plan, plan_reads, receive
from paceline.sync.block import Layout, layout_of

WAIT_S = 0.005  # for an operation of the leader, before a follower looks for calls again
JOIN_TIMEOUT_S = 60.0  # for the followers to connect
CALL = "call"  # marks a call of the controller to the whole group

Tensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
Gather = Callable[[], AbstractContextManager[Iterator[tuple[str, Tensor]]]]


class EngineRank(Protocol):
    """The engine of one rank. Steps are collective operations of all ranks."""

    def add(self, request_id: str, prompt: Sequence[int], salt: str, params: Any) -> None: ...
    def step(self) -> list[Any]: ...
    def abort(self, request_ids: Sequence[str]) -> None: ...
    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy this rank's shard of all tensors, one tensor at a time."""
        ...

    def sleep(self) -> None: ...
    def wake(self) -> None: ...


class Team:
    """The ranks of one engine: `size` consecutive ranks of the process group. The first leads."""

    def __init__(self, size: int) -> None:
        """Connect the ranks. All ranks of the process group must call this."""
        rank, world = dist.get_rank(), dist.get_world_size()
        if world % size:
            raise RolloutError(f"{world} ranks cannot be divided into engines of {size} ranks")
        self.size, self.leader = size, rank // size * size
        self.device = default_device()
        groups = [dist.new_group(list(range(n, n + size))) for n in range(0, world, size)]
        self._group = groups[rank // size]
        key = secrets.token_bytes(32)
        addresses: list[Any] = [None] * world
        if self.leads:
            followers: queue.SimpleQueue[Connection[Any, Any]] = queue.SimpleQueue()
            host = address_in_group()
            listener = Listener(host, key, 0, lambda found, _: followers.put(_channel(found)))
            dist.all_gather_object(addresses, ((host, listener.port), key))
            try:
                self.channels = [followers.get(timeout=JOIN_TIMEOUT_S) for _ in range(size - 1)]
            except queue.Empty:
                raise RolloutError(
                    f"not all of {size} ranks connected to rank {rank} within {JOIN_TIMEOUT_S:g} s"
                ) from None
            finally:
                listener.close()
        else:
            dist.all_gather_object(addresses, None)
            address, key = addresses[self.leader]
            self.channels = [_channel(connect(address, key, b"", JOIN_TIMEOUT_S))]
        for channel in self.channels:
            _send_at_once(channel)

    @property
    def leads(self) -> bool:
        return dist.get_rank() == self.leader

    def post(self, operation: str, *args: Any) -> None:
        """Have the followers perform an operation."""
        for channel in self.channels:
            channel.send((operation, args))

    def post_call(self) -> None:
        """Have the followers perform the next call of the controller to the whole group."""
        self.post(CALL)

    def ordered(self, gather: Gather) -> Gather:
        """Return `gather` as a call to the whole group, on the leader."""

        @contextmanager
        def marked() -> Iterator[Iterator[tuple[str, Tensor]]]:
            self.post_call()
            with gather() as tensors:
                yield tensors

        return marked

    def smallest(self, number: int) -> int:
        """Return the smallest number of all ranks."""
        found = torch.tensor(number)
        dist.all_reduce(found, dist.ReduceOp.MIN, self._group)
        return int(found)

    def send(self, tensor: Tensor, rank: int) -> Callable[[], None]:
        """Start to send a tensor to a follower; return a function that waits until it is sent."""
        held = _bytes(tensor.to(self.device).contiguous())
        work: Any = dist.isend(held, rank, self._group)

        def wait(_held: Tensor = held) -> None:  # its memory is read until then
            work.wait()

        return wait

    def receive(self, tensor: Tensor) -> None:
        """Receive the elements of a tensor from the leader."""
        dist.recv(_bytes(tensor), self.leader, self._group)


class AllRanks:
    """The engines of all ranks as one, on the leader."""

    def __init__(self, own: EngineRank, team: Team) -> None:
        self._own, self._team = own, team
        self._layout: Layout | None = None  # of the tensors that the plans are for
        self._plans: dict[int, Plan] = {}  # what each follower reads
        self.received: dict[int, int] = {}  # bytes of the last load that each follower received

    def add(self, request_id: str, prompt: Sequence[int], salt: str, params: Any) -> None:
        self._team.post("add", request_id, prompt, salt, params)
        self._own.add(request_id, prompt, salt, params)

    def step(self) -> list[Any]:
        self._team.post("step")
        return self._own.step()

    def abort(self, request_ids: Sequence[str]) -> None:
        self._team.post("abort", request_ids)
        self._own.abort(request_ids)

    def sleep(self) -> None:
        self._team.post("sleep")
        self._own.sleep()

    def wake(self) -> None:
        self._team.post("wake")
        self._own.wake()

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load on all ranks, or raise SyncError.

        Every rank reads its shard from the file that has the tensors. Without one, the leader sends
        each follower what it reads, one tensor at a time. An iterator is different: every rank has
        its own.
        """
        if isinstance(tensors, Iterator):
            self._own.load(tensors)
            return
        named = dict(tensors)
        if file := _file_of(named):
            self._team.post("load_file", *file)
            incoming = iter(named.items())
        else:
            self._post_shards(layout_of(named.items()))
            incoming = self._send(named)
        try:
            _load_all(self._own, incoming)
        finally:
            replies = [channel.recv() for channel in self._team.channels]
        self.received = {rank: size for rank, size, _ in replies}
        if failures := [failure for _, _, failure in replies if failure]:
            self._layout = None  # plan again: a follower may have read something else
            raise SyncError(failures[0])

    def _post_shards(self, layout: Layout) -> None:
        """Have the followers receive what they read, and before the first time plan that."""
        plan = layout != self._layout
        self._team.post("load_shards", layout, plan)
        if plan:
            self._plans = dict(channel.recv() for channel in self._team.channels)
            self._layout = layout

    def _send(self, named: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named.items():
            sent = [
                self._team.send(part.view(tensor), rank)
                for rank, plan in self._plans.items()
                for part in plan.get(name, ())
                if part.nbytes
            ]
            yield name, tensor
            for wait in sent:
                wait()


class Follower:
    """A rank that performs what its leader posts: the part of its worker that generates."""

    def __init__(self, own: EngineRank, team: Team, gather: Gather | None = None) -> None:
        """`gather`: provides the weights if this is a rank of the trainer too."""
        self._own, self._team, self._gather = own, team, gather
        (self._channel,) = team.channels
        self._marked = False  # the next operation is a call of the controller
        self._left = False  # the leader has exited
        self._released = False
        self._files: dict[str, Tensor] = {}
        self._plan: Plan = {}  # what the engine reads of tensors from the leader
        self._whole: set[str] = set()  # tensors of which it does not always read the same
        self._received = 0  # bytes of this load

    def work(self) -> list[Any] | None:
        """Perform the next operation, if there is one."""
        self._perform_next(WAIT_S)
        return None if self._marked or self._left else []

    def await_call(self) -> None:
        """Perform everything that the leader posted before the call that is due."""
        if not self._marked:
            self._perform_until(CALL)
        self._marked = False

    def gather_weights(self, version: int) -> None:
        """Load the weights of the trainer, of which this worker is a rank. All ranks call it."""
        assert self._gather is not None, "the trainer is in the same group of ranks"
        self.await_call()
        with self._gather() as tensors:
            self._own.load(tensors)
        self._released = False

    def release(self) -> None:
        """Free the engine's memory until `gather_weights`, in a call to the whole group."""
        if not self._released:
            self._released = True
            self._perform_until("sleep")

    def _perform_until(self, operation: str) -> None:
        while self._perform_next(None) != operation:
            if self._left:
                raise RolloutError(f"rank {self._team.leader}, which leads, has exited")

    def _perform_next(self, wait_s: float | None) -> str | None:
        """Wait for an operation, perform it and return its name."""
        if self._marked or self._left or not self._channel.poll(wait_s):
            return None
        operation: str
        try:
            operation, args = self._channel.recv()
        except (EOFError, OSError):
            self._left = True  # the controller knows, and ends this rank too
            return None
        if operation == CALL:
            self._marked = True
        elif operation in ("load_file", "load_shards"):
            self._channel.send(self._load(getattr(self, f"_{operation}")(*args)))
        else:
            getattr(self._own, operation)(*args)
        return operation

    def _load(self, incoming: Iterator[tuple[str, Tensor]]) -> tuple[int, int, str | None]:
        """Load weights; return the rank, how many bytes it received, and why it failed."""
        rank, failure = dist.get_rank(), None
        self._received = 0
        try:
            _load_all(self._own, incoming)
        except Exception as error:
            failure = f"rank {rank}: {type(error).__name__}: {error}"
        return rank, self._received, failure

    def _load_file(self, path: str, size: int, places: "Places") -> Iterator[tuple[str, Tensor]]:
        if path not in self._files:
            self._files[path] = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        for name, (offset, shape, dtype) in places.items():
            length = shape.numel() * dtype.itemsize
            yield name, self._files[path][offset : offset + length].view(dtype).view(shape)

    def _load_shards(self, layout: Layout, plan: bool) -> Iterator[tuple[str, Tensor]]:
        device = self._team.device
        if plan:
            self._plan = plan_reads(self._own.load, layout, device, self._whole)
            self._channel.send((dist.get_rank(), self._plan))
        return receive(self._plan, layout, device, self._receive, self._whole.add)

    def _receive(self, tensor: Tensor) -> None:
        self._team.receive(tensor)
        self._received += tensor.nbytes


class InOrder:
    """A part that all ranks call, in the order of the leader's operations."""

    def __init__(self, part: Any, before: Callable[[], None]) -> None:
        """`before`: called before every method: on the leader it posts the marker, on a follower
        it waits for it."""
        self._part, self._before = part, before
        self.activities = getattr(part, "activities", {})

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._part, name)

        def call(*args: Any) -> Any:
            self._before()
            return method(*args)

        return call


Places = dict[str, tuple[int, torch.Size, torch.dtype]]  # offset in the file, shape and dtype


def _file_of(named: Mapping[str, Tensor]) -> tuple[str, int, Places] | None:
    """Return the file that all tensors are views of, its size and their places, if there is one."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in named.values()}
    storage = next(iter(named.values())).untyped_storage()
    if len(storages) > 1 or storage.device.type != "cpu" or storage.filename is None:
        return None
    places = {
        name: (int(tensor.storage_offset()) * tensor.itemsize, tensor.shape, tensor.dtype)
        for name, tensor in named.items()
    }
    return storage.filename, storage.nbytes(), places


def _bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor in the dtype that every backend can send."""
    return tensor.view(-1).view(torch.uint8)


def _load_all(own: EngineRank, incoming: Iterator[tuple[str, Tensor]]) -> None:
    """Load tensors. After an error take the rest too, because other ranks send or receive them."""
    try:
        own.load(incoming)
    finally:
        for _ in incoming:
            pass


def _channel(connection: socket.socket) -> "Connection[Any, Any]":
    connection.settimeout(None)
    return Connection(connection.detach())


def _send_at_once(channel: "Connection[Any, Any]") -> None:
    """Disable Nagle's algorithm, which delays a message until the last one is acknowledged."""
    with socket.socket(fileno=os.dup(channel.fileno())) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
