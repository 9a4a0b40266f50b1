"""The sampler: the distribution of its tokens, their log-probs, and independence of the batch."""

import numpy as np
import pytest
import torch

from paceline.rollout.native import sampling
from paceline.rollout.native.sampling import row_keys


def keys(n: int, seed: int = 0) -> np.ndarray:
    return row_keys(np.full(n, seed, np.uint64), np.arange(n))


def sample(
    logits: torch.Tensor,
    n: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
):
    rows = logits.expand(n, -1).clone()
    full = (
        np.full(n, temperature, np.float32),
        np.full(n, top_k, np.int64),
        np.full(n, top_p, np.float32),
    )
    return sampling.sample(rows, keys(n, seed), *full)


def reference(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Return the truncated distribution, computed token by token in plain Python and float64."""
    weights = np.exp((logits.double().numpy() - logits.max().item()) / temperature)
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    kept = order[:top_k] if top_k else order
    total, mass, nucleus = sum(weights[kept]), 0.0, []
    for token in kept:
        if mass >= top_p and nucleus:
            break
        nucleus.append(token)
        mass += weights[token] / total
    p = np.zeros(len(weights))
    p[nucleus] = weights[nucleus] / sum(weights[nucleus])
    return p


CASES = [
    (1.0, 0, 1.0),
    (0.7, 0, 1.0),
    (1.5, 5, 1.0),
    (1.0, 0, 0.8),
    (1.3, 12, 0.9),
    (1.0, 1, 1.0),
    (1.0, 0, 0.01),
    (1.0, 500, 0.999),
]


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), CASES)
def test_tokens_and_logprobs_follow_truncated_distribution(
    temperature: float, top_k: int, top_p: float
) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1)) * 2
    expected = reference(logits, temperature, top_k, top_p)
    n = 40_000
    tokens, logprobs = sample(logits, n, temperature, top_k, top_p)
    assert expected[tokens].min() > 0
    np.testing.assert_allclose(logprobs, np.log(expected[tokens]), atol=1e-5)
    counts = np.bincount(tokens, minlength=40)
    likely = expected * n >= 5
    chi2 = (((counts - expected * n) ** 2)[likely] / (expected * n)[likely]).sum()
    degrees = max(likely.sum() - 1, 1)
    assert chi2 < degrees + 5 * np.sqrt(2 * degrees)


def test_top_p_sorts_whole_vocabulary_when_nucleus_is_large() -> None:
    logits = torch.randn(30_000, generator=torch.Generator().manual_seed(2))
    tokens, logprobs = sample(logits, 20, top_p=0.95)
    expected = reference(logits, 1.0, 0, 0.95)
    np.testing.assert_allclose(logprobs, np.log(expected[tokens]), atol=1e-4)


def test_random_numbers_of_adjacent_positions_and_tokens_are_uncorrelated() -> None:
    u = -sampling.negative_exponentials(keys(512), 512, torch.device("cpu")).double().expm1()
    assert u.min() > 0 and u.max() < 1
    counts = torch.histc(u, 64, 0, 1)
    assert ((counts - u.numel() / 64) ** 2 / (u.numel() / 64)).sum() < 63 + 5 * np.sqrt(126)
    bound = 5 / np.sqrt(u.numel())
    for a, b in ((u[1:], u[:-1]), (u[:, 1:], u[:, :-1]), (u[:, ::2], u[:, 1::2])):
        assert abs(np.corrcoef(a.flatten(), b.flatten())[0, 1]) < bound
        assert abs(np.corrcoef((a - 0.5).abs().flatten(), (b - 0.5).abs().flatten())[0, 1]) < bound


def test_greedy_rows_take_likeliest_token_when_batched_with_sampled_rows() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(3))
    temperature = np.array([0, 1, 0, 0.5, 0, 1], np.float32)
    tokens, logprobs = sampling.sample(
        logits.clone(), keys(6), temperature, np.zeros(6, np.int64), np.ones(6, np.float32)
    )
    greedy = temperature == 0
    assert (tokens[greedy] == logits.argmax(-1).numpy()[greedy]).all()
    expected = logits.log_softmax(-1).max(-1).values.numpy()
    np.testing.assert_allclose(logprobs[greedy], expected[greedy], atol=1e-6)


def test_row_gets_same_token_alone_and_in_any_block() -> None:
    vocabulary, n = 50_000, 9  # two rows per block
    logits = torch.randn(n, vocabulary, generator=torch.Generator().manual_seed(4))
    row = keys(n)
    ones, zeros = np.ones(n, np.float32), np.zeros(n, np.int64)
    together, _ = sampling.sample(logits.clone(), row, ones, zeros, ones)
    for i in range(n):
        alone, _ = sampling.sample(
            logits[i : i + 1].clone(), row[i : i + 1], ones[:1], zeros[:1], ones[:1]
        )
        assert alone[0] == together[i]


def test_token_of_probability_zero_is_never_sampled() -> None:
    logits = torch.full((300,), -torch.inf)
    logits[[7, 150]] = 0.0
    tokens, logprobs = sample(logits, 2000)
    assert set(tokens.tolist()) == {7, 150}
    np.testing.assert_allclose(logprobs, np.log(0.5), atol=1e-6)
