"""Supervised loss: its gradient is that of transformers, and does not depend on packing."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline.algo.loss import SupervisedLoss
from paceline.data.examples import ExampleSettings, ExampleTokenizer
from paceline.data.rows import TokenizedRow
from paceline.data.source import open_source
from paceline.data.tiny import make_tokenizer
from paceline.supervised.inputs import make_batch
from paceline.training.settings import TrainSettings
from paceline.training.single import SingleDevice

TALK = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "four and five"},
]
ROWS = [
    {"prompt": "sort 4312=", "completion": "1234"},
    {"prompt": "sort 4312=", "completion": "no, 1234"},  # the same prompt
    {"prompt": "a", "completion": "a completion that is much longer than its prompt"},
    {"messages": TALK},
]


@pytest.fixture(scope="module")
def rows() -> list[TokenizedRow]:
    settings = ExampleSettings(shuffle=False)
    source = open_source(settings, make_tokenizer(), 0, ROWS, ExampleTokenizer)
    return [source.row(number) for number in range(len(ROWS))]


def gradient(
    model: str, rows: Sequence[TokenizedRow], micro_batch_tokens: int = 4096
) -> tuple[float, dict[str, Tensor]]:
    settings = TrainSettings(micro_batch_tokens=micro_batch_tokens)
    engine = SingleDevice.open(model, settings, 1.0, "policy")
    loss = engine.forward_backward(make_batch(rows), SupervisedLoss())["loss"]
    named = engine.model.named_parameters()
    return loss, {name: p.grad.clone() for name, p in named if p.grad is not None}


def masked_gradient(model: str, rows: Sequence[TokenizedRow]) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradient of transformers, with the labels of other tokens masked."""
    policy = AutoModelForCausalLM.from_pretrained(model)
    longest = max(len(row.tokens) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels, attention = torch.full_like(ids, -100), torch.zeros_like(ids)
    for i, row in enumerate(rows):
        assert row.mask is not None
        tokens = torch.from_numpy(row.tokens).long()
        ids[i, : len(tokens)], attention[i, : len(tokens)] = tokens, 1
        labels[i, : len(tokens)] = torch.where(torch.from_numpy(row.mask), tokens, -100)
    loss = policy(input_ids=ids, attention_mask=attention, labels=labels).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in policy.named_parameters()}


def test_gradient_is_that_of_causal_loss_of_transformers(
    model: str, rows: list[TokenizedRow]
) -> None:
    loss, found = gradient(model, rows)
    expected_loss, expected = masked_gradient(model, rows)
    assert loss == pytest.approx(expected_loss, abs=1e-5)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5)
    assert max(float(value.abs().max()) for value in expected.values()) > 1e-2


@pytest.mark.parametrize("tokens", [16, 64, 128])
def test_packing_changes_neither_loss_nor_gradient(
    model: str, rows: list[TokenizedRow], tokens: int
) -> None:
    loss, expected = gradient(model, rows)
    packed_loss, found = gradient(model, rows, tokens)
    assert packed_loss == pytest.approx(loss, abs=1e-6)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-5)
