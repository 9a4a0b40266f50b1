"""Chunked log-probs match the plain formula without holding all logits."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.training.head import ValueHead, chunked_logprobs


def inputs(
    rows: int = 7, vocabulary: int = 11, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=g, dtype=dtype)
        for shape in ((rows, 5), (vocabulary, 5), (vocabulary,))
    )
    return (
        hidden.requires_grad_(),
        weight.requires_grad_(),
        bias.requires_grad_(),
        torch.randint(vocabulary, (rows,), generator=g),
    )


def naive(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.t() if bias is None else hidden @ weight.t() + bias
    log_p = (logits / temperature).log_softmax(-1)
    return log_p[torch.arange(len(targets)), targets], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_chunked_logprobs_match_plain_formula(chunk: int, temperature: float) -> None:
    hidden, weight, bias, targets = inputs()
    mix = torch.linspace(-1, 1, 7, dtype=torch.float64)
    found = chunked_logprobs(hidden, weight, bias, targets, temperature, chunk)
    expected = naive(hidden, weight, bias, targets, temperature)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for scale in (0.0, 0.3):  # without and with an entropy bonus
        losses = [
            (logprobs * mix).sum() + scale * (entropy * mix).sum()
            for logprobs, entropy in (found, expected)
        ]
        gradients = [
            torch.autograd.grad(loss, (hidden, weight, bias), retain_graph=True) for loss in losses
        ]
        torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-12)


def test_gradients_match_finite_differences() -> None:
    hidden, weight, bias, targets = inputs(rows=3, vocabulary=4)
    assert torch.autograd.gradcheck(
        lambda h, w, b: chunked_logprobs(h, w, b, targets, 0.7, 2), (hidden, weight, bias)
    )
    assert torch.autograd.gradcheck(
        lambda h, w: chunked_logprobs(h, w, None, targets, 0.7, 2), (hidden, weight)
    )


def test_bfloat16_matmuls_return_float32_logprobs_and_weight_gradients() -> None:
    hidden, weight, bias, targets = inputs(dtype=torch.float32)
    rounded = hidden.detach().bfloat16().requires_grad_()
    logprobs, entropy = chunked_logprobs(rounded, weight, bias, targets, 0.7, 2)
    assert logprobs.dtype == entropy.dtype == torch.float32
    found = torch.autograd.grad(logprobs.sum() + entropy.sum(), (rounded, weight, bias))
    exact = torch.autograd.grad(
        sum(t.sum() for t in naive(hidden, weight, bias, targets, 0.7)), (hidden, weight, bias)
    )
    assert [g.dtype for g in found] == [torch.bfloat16, torch.float32, torch.float32]
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=0.05, atol=0.05)


class LargestTensor(TorchDispatchMode):
    """Size of the largest tensor that any operation created."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return result


def test_logprobs_never_hold_logits_of_whole_batch() -> None:
    hidden, weight, _, targets = inputs(rows=600, vocabulary=500, dtype=torch.float32)
    with LargestTensor() as spy:
        logprobs, entropy = chunked_logprobs(hidden, weight, None, targets, 1.0, 16)
        (logprobs.sum() + entropy.sum()).backward()
    assert spy.numel <= 16 * 500


def test_value_head_starts_at_zero() -> None:
    assert ValueHead(5)(torch.ones(3, 5), torch.zeros(3)).values.tolist() == [0.0, 0.0, 0.0]
