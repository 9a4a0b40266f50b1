"""Large float32 matrices are multiplied by oneDNN on a CPU, with the same results."""

import pytest
import torch

from paceline.model.operations import linear, uses_onednn
from paceline.model.weights import Linear

LARGE, SMALL = (300, 256), (64, 32)


def factors(shape: tuple[int, int], rows: int = 9) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    shapes = ((rows, shape[1]), shape, shape[:1])
    x, weight, bias = (torch.randn(*each, generator=g) for each in shapes)
    return x, weight, bias


@pytest.mark.parametrize("shape", [LARGE, SMALL])
@pytest.mark.parametrize("biased", [True, False])
@torch.no_grad()
def test_linear_equals_that_of_torch(shape: tuple[int, int], biased: bool) -> None:
    x, weight, bias = factors(shape)
    given = bias if biased else None
    expected = torch.nn.functional.linear(x, weight, given)
    torch.testing.assert_close(linear(x, weight, given), expected, rtol=0, atol=1e-4)
    residual = torch.ones(9, shape[0])
    Linear(weight, given).add_to(residual, x)
    torch.testing.assert_close(residual, 1 + expected, rtol=0, atol=1e-4)


@torch.no_grad()
def test_row_of_large_linear_does_not_depend_on_other_rows() -> None:
    x, weight, bias = factors(LARGE, rows=40)
    every = linear(x, weight, bias)
    if uses_onednn(x, weight):
        assert all(torch.equal(linear(x[:n], weight, bias), every[:n]) for n in (2, 3, 5, 17))


def test_linear_has_gradients_where_they_are_enabled() -> None:
    x, weight, bias = factors(LARGE)
    linear(x.requires_grad_(), weight, bias).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand_as(x), rtol=0, atol=1e-4)
