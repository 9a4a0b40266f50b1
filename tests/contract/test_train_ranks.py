"""FSDP on several ranks gives the results of a single device and exchanges checkpoints with it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from paceline.algo.loss import ValueLoss
from paceline.algo.settings import AlgorithmSettings
from paceline.errors import ConfigError
from paceline.model import attention
from paceline.model.packing import select_rows
from paceline.model.weights import DecoderWeights
from paceline.rollout.native.engine import NativeEngine
from paceline.training.actor import Actor, train_on
from paceline.training.critic import Critic
from paceline.training.engine import TrainEngine
from paceline.training.fsdp import Fsdp
from paceline.training.memory import memory_estimate
from paceline.training.settings import TrainSettings
from paceline.training.single import SingleDevice
from paceline.types import Batch, Request, Sampling
from tests.architectures import tiny_architecture
from tests.contract.conftest import FsdpRanks
from tests.contract.test_train_engine import (
    LOSS,
    TEMPERATURE,
    VOCABULARY,
    random_batch,
    same_bits,
    tiny,
    weights_of,
)
from tests.fault_report import Fault

SETTINGS = TrainSettings(learning_rate=1e-4, micro_batch_tokens=40, weight_decay=0.1)
NAMES = {"1": (1, 1), "2": (2, 1), "2 x tensor 2": (4, 2)}  # total ranks, tensor-parallel ranks


class Groups:
    """Ways to make an engine, by name: on one device or on groups of ranks."""

    def __init__(self, ranks: FsdpRanks) -> None:
        self._ranks = ranks

    def __getitem__(self, name: str) -> Any:
        if name == "single":
            return SingleDevice
        count, tensor = NAMES[name]
        return self._ranks[count].using(tensor_parallel=tensor)


@pytest.fixture
def groups(fsdp_ranks: FsdpRanks) -> Groups:
    return Groups(fsdp_ranks)


@dataclass(frozen=True)
class Step:
    """Result of one update: its metrics and the weights after it."""

    metrics: dict[str, float]
    weights: dict[str, Tensor]

    def difference(self, other: "Step") -> float:
        assert self.metrics.keys() == other.metrics.keys()
        assert self.weights.keys() == other.weights.keys()
        metrics = [abs(self.metrics[key] - other.metrics[key]) for key in ("loss", "grad_norm")]
        weights = [
            float((self.weights[name] - other.weights[name]).abs().max()) for name in self.weights
        ]
        return max(metrics + weights)


def step(
    build: Any,
    algorithm: str,
    name: str = "qwen3",
    batch: Batch | None = None,
    model: PreTrainedModel | None = None,
    **more: Any,
) -> Step:
    """Run one GRPO step of an actor, or one PPO step of actor and critic."""
    settings = AlgorithmSettings(name=algorithm, kl_coef=0.1)
    batch = batch or random_batch()
    actor = Actor(
        build(model or tiny(name), SETTINGS, temperature=TEMPERATURE, **more),
        settings,
        SETTINGS,
        10,
    )
    metrics, weights = actor.update(batch, 0), weights_of(actor.engine)
    if algorithm == "ppo":
        critic = Critic(
            build((model or tiny(name)).base_model, SETTINGS, head="value", **more),
            settings,
            SETTINGS,
            10,
        )
        metrics |= {f"critic {name}": value for name, value in critic.update(batch, 0).items()}
        weights |= {f"critic {name}": weight for name, weight in weights_of(critic.engine).items()}
        metrics["loss"] += metrics["critic loss"]
        metrics["grad_norm"] += metrics["critic grad_norm"]
    return Step(metrics, weights)


@pytest.mark.parametrize("ranks", ["2", "2 x tensor 2"])
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("name", ["llama", "qwen2-tied", "qwen3"])
def test_step_on_ranks_matches_single_device(
    groups: Groups, ranks: str, algorithm: str, name: str
) -> None:
    start = tiny(name).state_dict()
    expected = step(SingleDevice, algorithm, name)
    assert step(groups[ranks], algorithm, name).difference(expected) < 1e-5
    assert max(float((expected.weights[key] - start[key]).abs().max()) for key in start) > 9e-5, (
        "the step must change the weights, or the comparison shows nothing"
    )


@pytest.mark.parametrize("ranks", ["2", "2 x tensor 2"])
def test_step_matches_single_device_when_rows_are_fewer_than_ranks(
    groups: Groups, ranks: str
) -> None:
    whole = random_batch()
    batch = select_rows(whole, np.array([int(whole.lengths.argmax())]))
    expected = step(SingleDevice, "ppo", "qwen2", batch)
    assert step(groups[ranks], "ppo", "qwen2", batch).difference(expected) < 1e-5


def without_mask(model: PreTrainedModel, settings: TrainSettings, **options: Any) -> TrainEngine:
    """Return an engine whose attention is not causal."""

    def without_causal_mask(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, scale=scale, enable_gqa=True
        )

    # Created with the mask: otherwise the engine would detect the error and pad rows.
    engine = Fsdp(model, settings, **options)
    engine.forward_backward = _with_attention(engine.forward_backward, without_causal_mask)  # type: ignore[method-assign]
    return engine


def _with_attention(method: Any, wrong: Any) -> Any:
    def patched(*args: Any) -> Any:
        right = attention._short_rows
        attention._short_rows = wrong
        try:
            return method(*args)
        finally:
            attention._short_rows = right

    return patched


def test_comparison_detects_planted_layout_errors(groups: Groups) -> None:
    swapped = tiny("qwen3")
    projections = swapped.model.layers[0].self_attn
    projections.k_proj.weight.data, projections.v_proj.weight.data = (
        projections.v_proj.weight.data,
        projections.k_proj.weight.data,
    )
    right = step(SingleDevice, "grpo")
    assert step(groups["2"], "grpo", model=swapped).difference(right) > 1e-3
    assert step(groups["2"], "grpo", make=without_mask).difference(right) > 1e-3
    critic, batch = tiny("qwen3").base_model, random_batch()
    wrong = groups["2"](critic, SETTINGS, head="value", make=without_mask)
    reference = SingleDevice(tiny("qwen3").base_model, SETTINGS, head="value")
    loss = ValueLoss(None)
    for engine in (wrong, reference):
        engine.forward_backward(batch, loss)
        engine.optimizer_step(1e-1)
    found, expected = (e.forward_backward(batch, loss)["loss"] for e in (wrong, reference))
    assert abs(found - expected) > 1e-3


@pytest.mark.parametrize("ranks", ["single", "2", "2 x tensor 2"])
def test_native_engine_samples_trainers_most_likely_tokens(groups: Groups, ranks: str) -> None:
    trainer = groups[ranks](tiny("qwen3"), SETTINGS)
    trainer.forward_backward(random_batch(), LOSS)
    trainer.optimizer_step(1e-2)
    exported = weights_of(trainer)
    model = tiny("qwen3")
    model.load_state_dict(exported)
    engine = NativeEngine(
        model.config, DecoderWeights.from_module(model, share=False), slots=2, max_length=16
    )
    engine.submit([Request("a", (5, 6, 7), 0, Sampling(max_new_tokens=5, temperature=0))])
    finished: list[Any] = []
    while not finished:
        finished += engine.step()
    row = [5, 6, 7]
    for token in finished[0][1].tokens.tolist():
        assert token == _likeliest(trainer, row)
        row.append(token)
    assert same_bits(exported, weights_of(groups[ranks](model, SETTINGS))), (
        "importing exported weights must not change them"
    )


def _likeliest(trainer: TrainEngine, row: list[int]) -> int:
    """Return the trainer's most likely next token by the log-probs of all tokens."""
    length = len(row) + 1
    tokens = np.concatenate([[*row, token] for token in range(VOCABULARY)]).astype(np.int32)
    lengths = np.full(VOCABULARY, length, np.int32)
    mask = np.arange(len(tokens)) % length == length - 1
    zeros = np.zeros(len(tokens), np.float32)
    logprobs = trainer.logprobs(
        Batch(tokens, lengths, mask, zeros, tokens, zeros[:VOCABULARY], lengths)
    )
    return int(logprobs[mask].argmax())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("single", "2"),
        ("2", "single"),
        ("2", "1"),
        ("2", "2 x tensor 2"),
        pytest.param("2 x tensor 2", "2", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("head", ["policy", "value"])
@pytest.mark.fault("C8", "checkpoint of layout {before} loaded by layout {after}")
def test_checkpoint_continues_with_same_losses_on_other_ranks(
    groups: Groups, before: str, after: str, head: str, tmp_path: Path, fault: Fault
) -> None:
    loss = LOSS if head == "policy" else ValueLoss(None)

    def make(name: str) -> TrainEngine:
        model = tiny("qwen2-tied")
        return groups[name](model if head == "policy" else model.base_model, SETTINGS, head=head)

    def train(engine: TrainEngine, seeds: range) -> list[float]:
        losses = []
        for seed in seeds:
            losses.append(engine.forward_backward(random_batch(seed=seed), loss)["loss"])
            engine.optimizer_step(1e-3)
        return losses

    engine = make(before)
    train(engine, range(2))
    engine.save(tmp_path)
    expected = train(engine, range(2, 4))
    other = make(after)
    other.load(tmp_path)
    fault.fired()
    assert train(other, range(2, 4)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.fault("E1", "NaN in a row of one of two ranks")
def test_all_ranks_skip_update_when_row_of_one_rank_is_not_finite(
    groups: Groups, fault: Fault
) -> None:
    engine, clean = (groups["2"](tiny("qwen2"), SETTINGS) for _ in range(2))
    batch = random_batch()
    assert batch.advantages is not None
    row = np.repeat(np.arange(batch.num_rows), batch.lengths) == batch.lengths.argmax()
    broken = replace(batch, advantages=np.where(row, np.float32(np.nan), batch.advantages))
    before = weights_of(engine)
    metrics = train_on(engine, broken, LOSS, AlgorithmSettings(), 1e-3, step=0)
    assert metrics["updates_skipped"] == 1
    fault.fired()
    assert same_bits(before, weights_of(engine))
    for each in (engine, clean):
        train_on(each, batch, LOSS, AlgorithmSettings(), 1e-3, step=0)
    assert same_bits(weights_of(clean), weights_of(engine))


def test_checkpoint_replaces_one_of_more_ranks_in_same_folder(
    groups: Groups, tmp_path: Path
) -> None:
    groups["2"](tiny("qwen2"), SETTINGS).save(tmp_path)
    changed = tiny("qwen2")
    with torch.no_grad():
        changed.model.norm.weight.add_(1)
    SingleDevice(changed, SETTINGS).save(tmp_path)
    single = SingleDevice(tiny("qwen2"), SETTINGS)
    single.load(tmp_path)
    assert same_bits(weights_of(single), dict(changed.state_dict()))


def test_checkpoint_of_experts_moves_between_ranks_and_transformers(
    groups: Groups, tmp_path: Path
) -> None:
    """The experts of a layer are one sharded tensor in memory and many in the files."""
    engine = groups["2"](tiny_architecture("deepseek_v3"), SETTINGS)
    engine.forward_backward(random_batch(), LOSS)
    engine.optimizer_step(1e-3)
    engine.save(tmp_path / "ranks")
    expected = weights_of(engine)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "ranks" / "actor")
    assert same_bits(dict(opened.state_dict()), expected)
    single = SingleDevice(tiny_architecture("deepseek_v3", seed=1), SETTINGS)
    single.load(tmp_path / "ranks")
    assert same_bits(weights_of(single), expected)
    single.save(tmp_path / "single")
    other = groups["2"](tiny_architecture("deepseek_v3", seed=2), SETTINGS)
    other.load(tmp_path / "single")
    assert same_bits(weights_of(other), expected)


def test_bfloat16_on_ranks_approximates_single_device(groups: Groups) -> None:
    settings, batch = SETTINGS.model_copy(update={"dtype": "bfloat16"}), random_batch()
    single, sharded = SingleDevice(tiny("qwen2"), settings), groups["2"](tiny("qwen2"), settings)
    assert np.abs(single.logprobs(batch) - sharded.logprobs(batch)).max() < 0.1
    one, two = (engine.forward_backward(batch, LOSS)["loss"] for engine in (single, sharded))
    assert two == pytest.approx(one, abs=0.02)
    assert sharded.optimizer_step(1e-3) == pytest.approx(single.optimizer_step(1e-3), rel=0.05)


@pytest.mark.parametrize(
    ("name", "count", "of"),
    [("num_key_value_heads", 1, "key-value heads"), ("intermediate_size", 37, "MLP units")],
)
def test_ranks_keep_working_after_rejecting_indivisible_model(
    groups: Groups, name: str, count: int, of: str
) -> None:
    model = tiny("llama")
    setattr(model.config, name, count)
    with pytest.raises(ConfigError, match=f"does not divide the model's {count} {of}"):
        groups["2 x tensor 2"](model, SETTINGS, head="value")
    assert groups["2 x tensor 2"](tiny("llama"), SETTINGS).logprobs(random_batch()).any()


@pytest.mark.parametrize("ranks", ["2", "2 x tensor 2"])
@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3"])
def test_rank_holds_estimated_memory(groups: Groups, ranks: str, name: str) -> None:
    engine = groups[ranks](tiny(name), SETTINGS)
    engine.forward_backward(random_batch(), LOSS)
    engine.optimizer_step(1e-3)
    engine.forward_backward(random_batch(), LOSS)
    count, tensor = NAMES[ranks]
    settings = SETTINGS.model_copy(update={"backend": "fsdp", "tensor_parallel": tensor})
    estimate = memory_estimate(tiny(name).config, settings, count)
    assert engine.held() == {key: estimate[key] for key in ("parameters", "gradients", "optimizer")}
