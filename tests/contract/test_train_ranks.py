"""Engines on several ranks learn exactly what one device does, and hand over to each other; planted errors show."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.algo.loss import ValueLoss
from paceline.algo.settings import AlgorithmSettings
from paceline.errors import ConfigError
from paceline.model import attention
from paceline.model.packing import select_rows
from paceline.model.weights import DecoderWeights
from paceline.rollout.native.engine import NativeEngine
from paceline.train.actor import Actor
from paceline.train.critic import Critic
from paceline.train.engine import TrainEngine
from paceline.train.fsdp import Fsdp
from paceline.train.memory import memory_estimate
from paceline.train.settings import TrainSettings
from paceline.train.single import SingleDevice
from paceline.types import Batch, Request, Sampling
from tests.contract.test_train_engine import (
    LOSS,
    TEMPERATURE,
    VOCABULARY,
    random_batch,
    same_bits,
    tiny,
    weights_of,
)
from tests.ranks import Ranks

SETTINGS = TrainSettings(learning_rate=1e-4, micro_batch_tokens=40, weight_decay=0.1)
NAMES = {"1": (1, 1), "2": (2, 1), "2 x tensor 2": (4, 2)}  # ranks in all, tensor parallel


class Groups:
    """Groups of ranks by name, started when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: dict[str, Any] = {"single": SingleDevice}

    def __getitem__(self, name: str) -> Any:
        if name not in self._started:
            count, tensor = NAMES[name]
            folder = self._folder / name.replace(" ", "_")
            folder.mkdir()
            self._started[name] = Ranks(Fsdp, count, folder, backend="fsdp", tensor_parallel=tensor)
        return self._started[name]

    def close(self) -> None:
        for ranks in self._started.values():
            if isinstance(ranks, Ranks):
                ranks.close()


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Groups]:
    made = Groups(tmp_path_factory.mktemp("groups"))
    yield made
    made.close()


@dataclass(frozen=True)
class Step:
    """One update as it is compared: metrics, and all weights after it."""

    metrics: dict[str, float]
    weights: dict[str, Tensor]

    def gap(self, other: "Step") -> float:
        assert (
            self.metrics.keys() == other.metrics.keys()
            and self.weights.keys() == other.weights.keys()
        )
        gaps = [abs(self.metrics[name] - other.metrics[name]) for name in ("loss", "grad_norm")]
        return max(
            gaps
            + [
                float((self.weights[name] - other.weights[name]).abs().max())
                for name in self.weights
            ]
        )


def step(
    build: Any,
    algorithm: str,
    name: str = "qwen3",
    batch: Batch | None = None,
    model: PreTrainedModel | None = None,
    **more: Any,
) -> Step:
    """One GRPO step of an actor, or one PPO step of actor and critic."""
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
def test_one_step_gives_the_loss_norm_and_weights_of_a_single_device(
    groups: Groups, ranks: str, algorithm: str, name: str
) -> None:
    start = tiny(name).state_dict()
    expected = step(SingleDevice, algorithm, name)
    assert step(groups[ranks], algorithm, name).gap(expected) < 1e-5
    assert max(float((expected.weights[key] - start[key]).abs().max()) for key in start) > 9e-5, (
        "weights must move for this to mean something"
    )


@pytest.mark.parametrize("ranks", ["2", "2 x tensor 2"])
def test_fewer_rows_than_ranks_are_enough(groups: Groups, ranks: str) -> None:
    whole = random_batch()
    batch = select_rows(whole, np.array([int(whole.lengths.argmax())]))
    assert (
        step(groups[ranks], "ppo", "qwen2", batch).gap(step(SingleDevice, "ppo", "qwen2", batch))
        < 1e-5
    )


def without_mask(model: PreTrainedModel, settings: TrainSettings, **options: Any) -> TrainEngine:
    """An engine whose tokens see those after them."""

    def blind(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, scale=scale, enable_gqa=True
        )

    engine = Fsdp(
        model, settings, **options
    )  # with a mask: it would notice, and do without packed rows
    engine.forward_backward = _always(engine.forward_backward, blind)  # type: ignore[method-assign]
    return engine


def _always(method: Any, blind: Any) -> Any:
    def patched(*args: Any) -> Any:
        right = attention._short_rows
        attention._short_rows = blind
        try:
            return method(*args)
        finally:
            attention._short_rows = right

    return patched


def test_planted_layout_errors_show(groups: Groups) -> None:
    swapped = tiny("qwen3")
    projections = swapped.model.layers[0].self_attn
    projections.k_proj.weight.data, projections.v_proj.weight.data = (
        projections.v_proj.weight.data,
        projections.k_proj.weight.data,
    )
    right = step(SingleDevice, "grpo")
    assert step(groups["2"], "grpo", model=swapped).gap(right) > 1e-3
    assert step(groups["2"], "grpo", make=without_mask).gap(right) > 1e-3
    critic, batch = tiny("qwen3").base_model, random_batch()
    blind = groups["2"](critic, SETTINGS, head="value", make=without_mask)
    seeing = SingleDevice(tiny("qwen3").base_model, SETTINGS, head="value")
    loss = ValueLoss(None)
    for engine in (blind, seeing):
        engine.forward_backward(batch, loss)
        engine.optimizer_step(1e-1)
    found, expected = (engine.forward_backward(batch, loss)["loss"] for engine in (blind, seeing))
    assert abs(found - expected) > 1e-3


@pytest.mark.parametrize("ranks", ["single", "2", "2 x tensor 2"])
def test_the_native_engine_answers_as_the_trainer_itself_would(groups: Groups, ranks: str) -> None:
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
        "imported and exported again"
    )


def _likeliest(trainer: TrainEngine, row: list[int]) -> int:
    """The trainer's own choice for the next token: the log-prob of each there is."""
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
    [("single", "2"), ("2", "single"), ("2", "1"), ("2", "2 x tensor 2"), ("2 x tensor 2", "2")],
)
@pytest.mark.parametrize("head", ["policy", "value"])
def test_what_some_ranks_saved_others_continue_with_the_same_losses(
    groups: Groups, before: str, after: str, head: str, tmp_path: Path
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
    assert train(other, range(2, 4)) == pytest.approx(expected, abs=1e-5)


def test_bfloat16_is_near(groups: Groups) -> None:
    settings, batch = SETTINGS.model_copy(update={"dtype": "bfloat16"}), random_batch()
    single, sharded = SingleDevice(tiny("qwen2"), settings), groups["2"](tiny("qwen2"), settings)
    assert np.abs(single.logprobs(batch) - sharded.logprobs(batch)).max() < 0.1
    one, two = (engine.forward_backward(batch, LOSS)["loss"] for engine in (single, sharded))
    assert two == pytest.approx(one, abs=0.02)
    assert sharded.optimizer_step(1e-3) == pytest.approx(single.optimizer_step(1e-3), rel=0.05)


def test_a_model_that_cannot_be_split_is_refused_by_all_ranks_and_they_live_on(
    groups: Groups,
) -> None:
    model = tiny("llama")
    model.config.num_key_value_heads = 1
    with pytest.raises(ConfigError, match=r"does not divide the model's 1 key-value heads"):
        groups["2 x tensor 2"](model, SETTINGS, head="value")
    assert groups["2 x tensor 2"](tiny("llama"), SETTINGS).logprobs(random_batch()).any()


@pytest.mark.parametrize("ranks", ["2", "2 x tensor 2"])
@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3"])
def test_a_rank_holds_what_was_estimated(groups: Groups, ranks: str, name: str) -> None:
    engine = groups[ranks](tiny(name), SETTINGS)
    engine.forward_backward(random_batch(), LOSS)
    engine.optimizer_step(1e-3)
    engine.forward_backward(random_batch(), LOSS)
    count, tensor = NAMES[ranks]
    settings = SETTINGS.model_copy(update={"backend": "fsdp", "tensor_parallel": tensor})
    estimate = memory_estimate(tiny(name).config, settings, count)
    assert engine.held() == {key: estimate[key] for key in ("parameters", "gradients", "optimizer")}
