"""Fit of costs to measured points: non-negative least squares."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Fit:
    coefficients: tuple[float, ...]
    error: float  # mean relative error of the points
    error_max: float


def fit_line(
    rows: Sequence[Sequence[float]], seconds: Sequence[float], relative: bool = True
) -> Fit:
    """Fit seconds = row x coefficients, with coefficients of at least 0.

    `relative`: minimize the relative error, so that all points count the same. Otherwise the
    largest count most. There are few coefficients, so every subset of them that may be positive is
    tried: the best solution without a negative value is the optimum.
    """
    inputs, measured = np.array(rows, np.float64), np.array(seconds, np.float64)
    if inputs.ndim != 2 or len(inputs) != len(measured) or not len(measured):
        raise ConfigError(f"{len(rows)} rows and {len(seconds)} times: expected as many of both")
    if not (np.isfinite(inputs).all() and np.isfinite(measured).all() and (measured > 0).all()):
        raise ConfigError("a measured point is not a finite number, or its time is not above 0")
    weights = 1 / measured if relative else np.full(len(measured), 1 / measured.mean())
    scaled, wanted, columns = inputs * weights[:, None], measured * weights, inputs.shape[1]
    best, least = np.zeros(columns), float(columns and np.inf)
    for size in range(1, columns + 1):
        for chosen in combinations(range(columns), size):
            found = _solve(scaled[:, chosen], wanted)
            loss = float(((scaled[:, chosen] @ found - wanted) ** 2).sum())
            if (found >= 0).all() and loss < least * (1 - 1e-9):
                best, least = np.zeros(columns), loss
                best[list(chosen)] = found
    errors = np.abs(inputs @ best / measured - 1)
    return Fit(tuple(map(float, best)), float(errors.mean()), float(errors.max()))


def _solve(inputs: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    scale = np.abs(inputs).max(axis=0)
    scale[scale == 0] = 1.0
    found = np.linalg.lstsq(inputs / scale, wanted, rcond=None)[0]
    return np.asarray(found / scale, np.float64)


def fit_decode(points: Sequence[tuple[int, int, float]]) -> Fit:
    """Fit decode steps, measured as (sequences, context tokens, seconds).

    The coefficients are the seconds without context at each number of sequences, ascending, and
    decode_context_s. A line would not do: GPUs have other kernels for few sequences.
    """
    counts = sorted({n for n, *_ in points})
    rows = [(*(float(n == count) for count in counts), context) for n, context, _ in points]
    return fit_line(rows, [s for *_, s in points])


def fit_prefill(points: Sequence[tuple[int, int, float]]) -> Fit:
    """Fit waves of sequences that start together, measured as (sequences, tokens, seconds).

    The coefficients are a constant, prefill_token_s and prefill_sequence_s.
    """
    rows = [(1, tokens, n) for n, tokens, _ in points]
    return fit_line(rows, [s for *_, s in points], relative=False)


def fit_train(points: Sequence[tuple[int, int, float]]) -> Fit:
    """Fit train steps, measured as (tokens, tokens before each of them, seconds).

    The coefficients are train_step_s, train_token_s and train_context_s. The largest batches count
    most, because those of a run are larger still.
    """
    rows = [(1, tokens, before) for tokens, before, _ in points]
    return fit_line(rows, [s for *_, s in points], relative=False)
