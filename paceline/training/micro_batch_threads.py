"""Threads that process micro-batches in parallel on a CPU, one core each.

Small models spend much of a step in operations too small to split over cores; whole micro-batches
can run in parallel. torch releases the GIL while it computes, so threads suffice. Results arrive in
order, so sums do not depend on which thread is faster.
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
            ThreadPoolExecutor(count, "micro-batch", torch.set_num_threads, (1,))
            if count > 1
            else None
        )

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Yield `function(item)` for each item, in order.

        At most `count` items are in progress or finished but not yet consumed.
        """
        items = iter(items)
        while wave := list(islice(items, self.count)):
            if self._pool is None or len(wave) == 1:
                yield from map(function, wave)
            else:
                yield from self._pool.map(function, wave)

    def run_alone(
        self,
        function: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """Run a small function on one core: on a busy machine, synchronizing threads is slow."""
        return (
            function(*args, **kwargs)
            if self._pool is None
            else self._pool.submit(function, *args, **kwargs).result()
        )
