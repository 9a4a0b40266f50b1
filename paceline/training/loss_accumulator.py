"""The loss of a batch, summed over its micro-batches and ranks."""

import math

import torch
from torch import Tensor

from paceline.algo.loss import LossTerms
from paceline.errors import DataError
from paceline.types import Batch


class LossAccumulator:
    """Loss and metrics of a batch, accumulated over its micro-batches."""

    def __init__(self, batch: Batch) -> None:
        self._trained = int(batch.mask.sum())
        if self._trained == 0:
            raise DataError(
                f"a batch of {batch.num_rows} rows and {batch.num_tokens} tokens has no trained "
                "token: its mask is empty; pass at least one token with mask = true"
            )
        self._loss = 0.0
        self._sums: dict[str, float] = {}
        self._maxima: dict[str, float] = {}
        self._unread: list[tuple[list[str], list[str], Tensor]] = []

    def add(self, terms: LossTerms) -> None:
        """Add the terms of a micro-batch, without waiting for the device to compute them."""
        values = torch.stack(
            [
                value.detach().double()
                for value in (terms.loss, *terms.sums.values(), *terms.maxima.values())
            ]
        )
        self._unread.append((list(terms.sums), list(terms.maxima), values))

    def merge(self, loss: float, sums: dict[str, float], maxima: dict[str, float]) -> None:
        self._loss += loss
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        for name, value in maxima.items():
            before = self._maxima.get(name, -math.inf)
            # max() would lose a nan.
            self._maxima[name] = value if value > before or math.isnan(value) else before

    def totals(self) -> tuple[float, dict[str, float], dict[str, float]]:
        """Return the arguments for `merge` of another accumulator."""
        for sums, maxima, tensor in self._unread:
            loss, *values = tensor.tolist()
            self.merge(
                loss,
                dict(zip(sums, values, strict=False)),
                dict(zip(maxima, values[len(sums) :], strict=True)),
            )
        self._unread.clear()
        return self._loss, self._sums, self._maxima

    def metrics(self) -> dict[str, float]:
        loss, sums, maxima = self.totals()
        means = {name: total / self._trained for name, total in sums.items()}
        return {"loss": loss} | means | maxima
