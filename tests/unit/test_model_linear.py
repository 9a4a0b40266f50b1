"""Large float32 matrices are multiplied by oneDNN on a CPU, with the same results."""

import copy

import pytest
import torch
from torch import nn

from paceline.model.linear import (
    TrainedLinear,
    linear,
    pack,
    product,
    speed_up_linears,
    uses_onednn,
)
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


def layers(biased: bool) -> tuple[nn.Linear, nn.Linear]:
    """Return a layer of torch and one with the same weights that may use oneDNN."""
    plain = nn.Linear(256, 300, bias=biased)
    fast = copy.deepcopy(plain)
    fast.__class__ = TrainedLinear
    return plain, fast


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", [(80, 256), (2, 40, 256), (3, 256)])
def test_trained_linear_has_the_outputs_and_gradients_of_torch(
    biased: bool, shape: tuple[int, ...]
) -> None:
    outputs, gradients = [], []
    for layer in layers(biased):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
        out = layer(x)
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        outputs.append(out)
        gradients.append([x.grad, *(parameter.grad for parameter in layer.parameters())])
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-4)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-3)


def test_trained_linear_computes_no_gradient_of_a_frozen_weight() -> None:
    _, layer = layers(biased=True)
    layer.requires_grad_(False)
    x = torch.randn(80, 256, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand_as(x), rtol=0, atol=1e-4)
    assert layer.weight.grad is None and layer.bias.grad is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_trained_linear_leaves_other_dtypes_to_torch(dtype: torch.dtype) -> None:
    plain, fast = layers(biased=True)
    x = torch.randn(80, 256)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        if dtype == torch.float64:
            plain, fast, x = plain.double(), fast.double(), x.double()
        found, expected = fast(x), plain(x)
    assert found.dtype == dtype
    assert torch.equal(found, expected)


def test_only_plain_linear_layers_of_a_model_are_sped_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(nn.Linear):
        pass

    monkeypatch.setattr("paceline.model.linear._ONEDNN", True)
    model = nn.Sequential(nn.Linear(2, 2), Own(2, 2), nn.LayerNorm(2))
    speed_up_linears(model)
    assert [type(module) for module in model] == [TrainedLinear, Own, nn.LayerNorm]


@pytest.mark.parametrize("rows", [3, 80])
@torch.no_grad()
def test_product_equals_that_of_torch(rows: int) -> None:
    x, weight, _ = factors(LARGE, rows)
    torch.testing.assert_close(product(x, weight.t()), x @ weight.t(), rtol=0, atol=1e-4)
    y = torch.randn(rows, LARGE[0])
    torch.testing.assert_close(product(y, weight), y @ weight, rtol=0, atol=1e-4)


@torch.no_grad()
def test_packed_weight_gives_the_same_rows_in_every_batch() -> None:
    x, weight, bias = factors(LARGE, rows=40)
    packed = pack(weight)
    every = linear(x, packed, bias)
    expected = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(every, expected, rtol=0, atol=1e-4)
    assert all(torch.equal(linear(x[:n], packed, bias), every[:n]) for n in (2, 3, 5, 17))
    residual = torch.ones(40, 300)
    Linear(weight, bias).packed().add_to(residual, x)
    torch.testing.assert_close(residual, 1 + every)
