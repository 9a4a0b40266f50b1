"""Micro-batches side by side on CPU: one core each, instead of all cores on one operation after the other.

Small models spend much of a step in operations too small to be divided; whole micro-batches always can be. torch gives up Python's
lock while it computes, so threads are enough. Results come in order, so sums do not depend on which lane was faster.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import ParamSpec, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class MicroBatchThreads:
    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = (
            ThreadPoolExecutor(count, "lane", torch.set_num_threads, (1,)) if count > 1 else None
        )

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """`function` of each item, in order; at most `count` at a time are worked on or waiting to be taken."""
        items = iter(items)
        while wave := list(islice(items, self.count)):
            if self._pool is None or len(wave) == 1:
                yield from map(function, wave)
            else:
                yield from self._pool.map(function, wave)

    def alone(
        self,
        function: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """Run what is too small to be divided on one core: on a busy machine, threads that wait for each other wait long."""
        return (
            function(*args, **kwargs)
            if self._pool is None
            else self._pool.submit(function, *args, **kwargs).result()
        )
