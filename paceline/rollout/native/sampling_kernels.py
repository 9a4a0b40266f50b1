"""Triton kernels of the native engine that sample: top-k and top-p, the token and its log-prob."""

# mypy: ignore-errors
# (Triton kernels share only the syntax of Python)

import triton
import triton.language as tl

from paceline.rollout.native.kernels import (
    LAST,
    LIMIT,
    POSITION,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)

LOG2_E = tl.constexpr(1.4426950408889634)
# Keeps u strictly inside (0, 1), so that a token of probability 0 never wins.
U_STEP = tl.constexpr(2.0**-31 * (1 - 2.0**-20))
LOWEST = tl.constexpr(-(2**31))


@triton.jit
def _ordered(x):
    """Map floats to integers with the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def truncate(logits, state, floors, stride, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """Find the lowest logit that top-k, then top-p keep in a row, as an ordered integer.

    Bisection makes it exact; ties are kept.
    """
    row = tl.program_id(0)
    k = tl.load(state + TOP_K * stride + row)
    p = tl.load(state + TOP_P * stride + row).to(tl.float32, bitcast=True)
    floor = tl.full([], LOWEST, tl.int32)
    tl.store(floors + row, floor)
    if (k <= 0) & (p >= 1.0):
        return
    temperature = tl.load(state + TEMPERATURE * stride + row).to(tl.float32, bitcast=True)
    temperature = tl.where(temperature == 0, 1.0, temperature)
    here = logits + row.to(tl.int64) * VOCABULARY
    at = tl.arange(0, BLOCK)
    highs = tl.full([BLOCK], -float("inf"), tl.float32)
    for n in range(0, VOCABULARY, BLOCK):
        highs = tl.maximum(
            highs, tl.load(here + n + at, mask=n + at < VOCABULARY, other=-float("inf"))
        )
    top = tl.max(highs, 0)
    ceiling = _ordered(top)
    if (k > 0) & (k < VOCABULARY):
        high = ceiling
        while floor < high:  # find the highest value that at least k logits reach
            middle = (floor | high) - ((floor ^ high) >> 1)  # rounded up; a sum could overflow
            found = tl.zeros([BLOCK], tl.int32)
            for n in range(0, VOCABULARY, BLOCK):
                value = _ordered(
                    tl.load(here + n + at, mask=n + at < VOCABULARY, other=-float("inf"))
                )
                found += ((value >= middle) & (n + at < VOCABULARY)).to(tl.int32)
            enough = tl.sum(found, 0) >= k
            floor = tl.where(enough, middle, floor)
            high = tl.where(enough, high, middle - 1)
    if p < 1.0:
        kept = tl.zeros([BLOCK], tl.float32)
        for n in range(0, VOCABULARY, BLOCK):
            logit = tl.load(here + n + at, mask=n + at < VOCABULARY, other=-float("inf"))
            kept += tl.where(_ordered(logit) >= floor, tl.exp((logit - top) / temperature), 0.0)
        wanted = p * tl.sum(kept, 0)
        high = ceiling
        while floor < high:  # find the lowest value above which there is less than p
            middle = (floor & high) + ((floor ^ high) >> 1)
            above = tl.zeros([BLOCK], tl.float32)
            for n in range(0, VOCABULARY, BLOCK):
                logit = tl.load(here + n + at, mask=n + at < VOCABULARY, other=-float("inf"))
                above += tl.where(
                    _ordered(logit) > middle, tl.exp((logit - top) / temperature), 0.0
                )
            less = tl.sum(above, 0) < wanted
            high = tl.where(less, middle, high)
            floor = tl.where(less, floor, middle + 1)
    tl.store(floors + row, floor)


@triton.jit
def _row_key(low, high, position):
    """Hash a seed and a position with splitmix64, as `sampling.row_keys` does."""
    seed = (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low.to(
        tl.uint32, bitcast=True
    ).to(tl.uint64)
    x = seed + (position.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _exponential(hash, mask, multiplier):
    """Return an exponential random number, up to a constant factor, from two hashes.

    They are those of a row and of a token; u has a resolution of 2^-31 near 0.
    """
    x = (hash ^ mask) * multiplier
    x = (x ^ (x >> 15)) * 0x2C1B3C6D
    u = (x & 0x7FFFFFFF).to(tl.float32) * U_STEP + U_STEP / 4
    # -log2(1 - u) near 0, where the race is decided.
    series = u * (LOG2_E + u * (0.5 * LOG2_E + u * (LOG2_E / 3)))
    return tl.where(u < 0.0078125, series, -tl.log2(1 - u))


@triton.jit
def sample(
    logits, hashes, state, floors, maxima, masses, scores, winners, stride,
    VOCABULARY: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, TRUNCATED: tl.constexpr,
):  # fmt: skip
    """Sample within one split of the vocabulary of a row.

    Stores the split's softmax maximum and sum, and the winner of its exponential race: the token
    with the largest p / E is a sample of p (the Gumbel-max trick without the outer logarithm). Each
    SIMD lane keeps its best p / E as a pair, which avoids divisions; the lanes are compared at the
    end, in logarithms to base 2.
    """
    row, split = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(state + TEMPERATURE * stride + row).to(tl.float32, bitcast=True)
    greedy = temperature == 0
    scale = LOG2_E * tl.where(greedy, 1.0, 1.0 / temperature)
    low, high = tl.load(state + SEED_LOW * stride + row), tl.load(state + SEED_HIGH * stride + row)
    key = _row_key(low, high, tl.load(state + POSITION * stride + row) + 1)
    mask = key.to(tl.uint32).to(tl.int32, bitcast=True)
    multiplier = ((key >> 32).to(tl.uint32) | 1).to(tl.int32, bitcast=True)
    PART: tl.constexpr = (VOCABULARY + SPLITS - 1) // SPLITS
    most = tl.full([BLOCK], -1e30, tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    best = tl.zeros([BLOCK], tl.float32)  # p of the best token, relative to the lane's maximum
    time = tl.full([BLOCK], 1.0, tl.float32)  # E of the best token
    winner = tl.zeros([BLOCK], tl.int32)
    here = logits + row.to(tl.int64) * VOCABULARY
    end = tl.minimum((split + 1) * PART, VOCABULARY)
    for n in range(split * PART, end, BLOCK):
        at = n + tl.arange(0, BLOCK)
        logit = tl.load(here + at, mask=at < end, other=-float("inf"))
        if TRUNCATED:
            logit = tl.where(_ordered(logit) >= tl.load(floors + row), logit, -float("inf"))
        logit = logit * scale
        higher = tl.maximum(most, logit)
        fade, p = tl.exp2(most - higher), tl.exp2(logit - higher)
        most = higher
        mass = mass * fade + p
        best = best * fade
        e = _exponential(tl.load(hashes + at, mask=at < end, other=0), mask, multiplier)
        e = tl.where(greedy, 1.0, e)
        wins = p * time > best * e
        best = tl.where(wins, p, best)
        time = tl.where(wins, e, time)
        winner = tl.where(wins, at, winner)
    top = tl.max(most, 0)
    score = tl.where(best > 0, most + tl.log2(best) - tl.log2(time), -float("inf"))
    highest = tl.max(score, 0)
    to = row * SPLITS + split
    tl.store(maxima + to, top)
    tl.store(masses + to, tl.sum(mass * tl.exp2(most - top), 0))
    tl.store(scores + to, highest)
    tl.store(winners + to, tl.min(tl.where(score == highest, winner, VOCABULARY - 1), 0))


@triton.jit
def advance(
    logits, state, maxima, masses, scores, winners, tick, out, stride,
    VOCABULARY: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Store a row's sampled token and log-prob in `out` [step, 2, row]; advance it unless idle."""
    row = tl.program_id(0)
    at = tl.arange(0, SPLITS)
    most, mass = tl.load(maxima + row * SPLITS + at), tl.load(masses + row * SPLITS + at)
    score, winner = tl.load(scores + row * SPLITS + at), tl.load(winners + row * SPLITS + at)
    token = tl.min(tl.where(score == tl.max(score, 0), winner, VOCABULARY - 1), 0)
    temperature = tl.load(state + TEMPERATURE * stride + row).to(tl.float32, bitcast=True)
    logit = tl.load(logits + row.to(tl.int64) * VOCABULARY + token) / tl.where(
        temperature == 0, 1.0, temperature
    )
    top = tl.max(most, 0)
    logprob = logit - top / LOG2_E - tl.log(tl.sum(mass * tl.exp2(most - top), 0))
    position = tl.load(state + POSITION * stride + row)
    to = out + (tl.load(tick) - 1) * 2 * stride + row
    tl.store(to, token)
    tl.store(to + stride, logprob.to(tl.int32, bitcast=True))
    if position < tl.load(state + LIMIT * stride + row):
        tl.store(state + LAST * stride + row, token)
        tl.store(state + POSITION * stride + row, position + 1)
