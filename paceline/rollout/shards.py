"""The elements of each tensor that a rank's weight loader reads, so that it gets only these.

A `Shard` has the shape, dtype and device of a tensor, but no elements. A view of it (a slice, a
transpose) is a shard too, and an operation that needs elements gets those of the view from a
source. `plan_reads` loads shards whose source records what it is asked for and returns zeros.
`receive` loads shards whose source has exactly these elements.

Nothing here depends on the loader: whatever it does reaches PyTorch's dispatcher as operations on
views. A tensor that it reads completely, or changes in place, is sent completely.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from paceline.errors import SyncError
from paceline.sync.block import Layout

log = logging.getLogger(__name__)

ATTEMPTS = 3  # to record; after each, more tensors are sent completely


class Part(NamedTuple):
    """Elements of a contiguous tensor."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, view: Tensor) -> "Part":
        return cls(view.dtype, tuple(view.size()), view.stride(), int(view.storage_offset()))

    @property
    def nbytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize

    def view(self, whole: Tensor) -> Tensor:
        flat = whole.contiguous().view(-1).view(self.dtype)
        return flat.as_strided(self.size, self.stride, int(flat.storage_offset()) + self.offset)


Plan = Mapping[str, Collection[Part]]  # what is read of each tensor, of which anything is


class Source(Protocol):
    """Provides the elements of a shard."""

    device: torch.device

    def read(self, part: Part) -> Tensor: ...
    def refuse(self, operation: str) -> None:
        """Raise an error: shards do not support this operation."""
        ...


class Shard(Tensor):
    """A tensor without elements, or a view of one."""

    _view: Tensor  # of a tensor without memory
    _source: Source
    # vLLM's parameters customize this, and they need no help to combine with a shard.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, view: Tensor, source: Source) -> "Shard":
        made: Shard = torch.Tensor._make_wrapper_subclass(
            cls,
            view.size(),
            strides=view.stride(),
            storage_offset=view.storage_offset(),
            dtype=view.dtype,
            device=source.device,
        )
        made._view, made._source = view, source
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Shard({tuple(self.shape)}, {self.dtype})"

    def read(self) -> Tensor:
        return self._source.read(Part.of(self._view))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (written := _written(func, args, kwargs)) is not None:
            written._source.refuse(str(func))
        returns = [each.alias_info for each in func._schema.returns]
        if any(info and not info.is_write for info in returns):
            view = _view(func, args, kwargs)
            if view is not None:
                return view
        args, kwargs = tree_map_only(Shard, Shard.read, (args, kwargs))
        return func(*args, **kwargs)


def _written(function: Any, args: Any, kwargs: Any) -> Shard | None:
    """Return a shard that this operation would change."""
    for index, argument in enumerate(function._schema.arguments):
        if argument.alias_info and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            for leaf in tree_leaves(value):
                if isinstance(leaf, Shard):
                    return leaf
    return None


def _view(function: Any, args: Any, kwargs: Any) -> Any:
    """Return the result as a shard, or several; None if it is not a view of one."""
    shards = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Shard)]
    if len(shards) != 1:
        return None  # a shard is copied into a tensor
    (shard,) = shards
    args, kwargs = tree_map_only(Shard, lambda each: each._view, (args, kwargs))
    result = function(*args, **kwargs)
    # Some operations, as `contiguous`, copy only if they must.
    if any(_storage(leaf) != _storage(shard._view) for leaf in tree_leaves(result)):
        return None
    return tree_map_only(Tensor, lambda view: Shard(view, shard._source), result)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class Recorder:
    """Records what is read of a tensor."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.parts: dict[Part, None] = {}
        self.refused = False

    def read(self, part: Part) -> Tensor:
        self.parts[part] = None
        return torch.zeros((), dtype=part.dtype, device=self.device).expand(part.size)

    def refuse(self, operation: str) -> None:
        self.refused = True
        raise NotImplementedError(f"{operation} on a tensor whose elements are not known yet")


class Received:
    """Has what was recorded."""

    def __init__(
        self,
        name: str,
        parts: Mapping[Part, Tensor],
        device: torch.device,
        missed: Callable[[str], None],
    ) -> None:
        self.device = device
        self._name, self._parts, self._missed = name, parts, missed

    def read(self, part: Part) -> Tensor:
        if part not in self._parts:
            self.refuse(f"reads {part}")
        return self._parts[part]

    def refuse(self, operation: str) -> None:
        self._missed(self._name)
        raise SyncError(
            f"{self._name}: the loader did not do the same as before ({operation}); expected reads "
            f"of {list(self._parts)}. The next load sends the whole tensor"
        )


def plan_reads(
    load: Callable[[Iterable[tuple[str, Tensor]]], None],
    layout: Layout,
    device: torch.device,
    whole: Collection[str] = (),
) -> Plan:
    """Return what `load` reads of each tensor; all of those in `whole`. It loads zeros."""
    complete = set(whole)
    error: Exception | None = None
    for _ in range(ATTEMPTS):
        recorders = {name: Recorder(device) for name, _, _ in layout if name not in complete}
        try:
            load(_zeros(layout, device, recorders))
        except Exception as found:
            error = found
            refused = {name for name, recorder in recorders.items() if recorder.refused}
            if not refused:
                break
            complete |= refused
        else:
            plan = {
                name: _parts(shape, dtype, recorders.get(name)) for name, shape, dtype in layout
            }
            return {name: parts for name, parts in plan.items() if parts}
    log.warning(
        "what the weight loader reads of each tensor could not be recorded (%s: %s); this rank "
        "gets whole tensors",
        type(error).__name__,
        error,
    )
    return {name: _parts(shape, dtype, None) for name, shape, dtype in layout}


def receive(
    plan: Plan,
    layout: Layout,
    device: torch.device,
    fill: Callable[[Tensor], None],
    missed: Callable[[str], None],
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors, with the parts of the plan in memory, one tensor at a time.

    `fill`: receives the elements of a tensor. `missed`: called with the name of a tensor of which
    other elements are read.
    """
    for name, shape, dtype in layout:
        parts: dict[Part, Tensor] = {}
        for part in plan.get(name, ()):
            parts[part] = torch.empty(part.size, dtype=part.dtype, device=device)
            if part.nbytes:
                fill(parts[part])
        empty = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        if (whole := Part.of(empty)) in parts:
            yield name, parts[whole]
        else:
            yield name, Shard(empty, Received(name, parts, device, missed))


def _zeros(
    layout: Layout, device: torch.device, recorders: Mapping[str, Recorder]
) -> Iterator[tuple[str, Tensor]]:
    for name, shape, dtype_name in layout:
        dtype = getattr(torch, dtype_name)
        if name in recorders:
            yield name, Shard(torch.empty(shape, dtype=dtype, device="meta"), recorders[name])
        else:
            yield name, torch.zeros(shape, dtype=dtype, device=device)


def _parts(shape: tuple[int, ...], dtype: str, recorder: Recorder | None) -> list[Part]:
    """Return what was read of a tensor: all of it if the parts are not smaller."""
    whole = Part.of(torch.empty(shape, dtype=getattr(torch, dtype), device="meta"))
    if recorder is None or sum(part.nbytes for part in recorder.parts) >= whole.nbytes > 0:
        return [whole]
    return list(recorder.parts)
