"""Contract of every train engine. To test a new backend, add it to the fixture `build`."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from examples.custom_correction import mean_one
from examples.custom_loss import clip
from paceline.algo.loss import LossTerms, PolicyLoss, TokenData, TokenOutputs, ValueLoss
from paceline.algo.settings import AlgorithmSettings
from paceline.errors import CheckpointError, ConfigError, DataError
from paceline.training.actor import Actor
from paceline.training.engine import TrainEngine
from paceline.training.settings import TrainSettings
from paceline.training.single import SingleDevice
from paceline.types import Batch, FloatArray
from tests.contract.conftest import FsdpRanks
from tests.fault_report import Fault
from tests.ranks import RemoteEngine

VOCABULARY, TEMPERATURE = 37, 0.8
EngineFactory = Callable[..., TrainEngine]  # (model, settings, temperature=, head=)
MODELS = ("llama", "qwen2", "qwen2-tied", "qwen3")


@pytest.fixture(scope="module", params=["single", "fsdp on two ranks"])
def build(request: pytest.FixtureRequest, fsdp_ranks: FsdpRanks) -> EngineFactory:
    return SingleDevice if request.param == "single" else fsdp_ranks[2]


def tiny(name: str) -> PreTrainedModel:
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "tie_word_embeddings": name.endswith("tied"),
    }  # fmt: skip
    torch.manual_seed(0)
    model: PreTrainedModel
    if name == "llama":
        model = LlamaForCausalLM(LlamaConfig(**shape))
    elif name == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=8))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**shape))
    with torch.no_grad():  # no bias is 0 and no norm 1, so that omitting one changes the result
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def random_batch(rows: int = 6, seed: int = 0) -> Batch:
    """Return rows of different lengths with masks of several turns.

    One row has no trained token, and two rows share their prompt.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 20, rows).astype(np.int32)
    total = int(lengths.sum())
    mask = rng.random(total) < 0.6
    starts = np.cumsum(lengths) - lengths
    mask[starts] = False

    tokens = rng.integers(0, VOCABULARY, total).astype(np.int32)
    empty, *_, one, other = np.argsort(lengths)
    mask[starts[empty] : starts[empty] + lengths[empty]] = False
    for row in (one, other):
        mask[starts[row] : starts[row] + 5], mask[starts[row] + 5] = False, True
        tokens[starts[row] : starts[row] + 5] = tokens[starts[one] : starts[one] + 5]

    def normal(scale: float) -> FloatArray:
        return np.where(mask, rng.standard_normal(total) * scale, 0).astype(np.float32)

    return Batch(
        tokens=tokens,
        lengths=lengths,
        mask=mask,
        logprobs=normal(0.3) - 3.5 * mask.astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        rewards=rng.random(rows).astype(np.float32),
        groups=(np.arange(rows) // 2).astype(np.int32),
        advantages=normal(1),
        returns=normal(1),
        values=normal(1),
        ref_logprobs=normal(0.3) - 3.5 * mask.astype(np.float32),
    )


def plain_logprobs(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return log-prob and entropy of each trained token by plain forward passes, row by row."""
    offsets, logprobs, entropies = batch.offsets, [], []
    for row in range(batch.num_rows):
        ids = torch.from_numpy(batch.tokens[offsets[row] : offsets[row + 1]].astype(np.int64))[None]
        log_p = (model(input_ids=ids, use_cache=False).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        keep = torch.from_numpy(batch.mask[offsets[row] + 1 : offsets[row + 1]])
        logprobs.append(log_p.gather(1, ids[0, 1:, None])[:, 0][keep])
        entropies.append(-(log_p.exp() * log_p).sum(-1)[keep])
    return torch.cat(logprobs), torch.cat(entropies)


class Counted:
    """A loss that counts its calls, one per micro-batch."""

    def __init__(self, inner: PolicyLoss) -> None:
        self.inner, self.calls = inner, 0

    def weights(self, batch: Batch) -> FloatArray:
        return self.inner.weights(batch)

    def __call__(self, outputs: TokenOutputs, data: TokenData) -> LossTerms:
        self.calls += 1
        return self.inner(outputs, data)


ALGORITHM = AlgorithmSettings(kl_coef=0.1, entropy_coef=0.01, aggregation="sequence")
LOSS = PolicyLoss(ALGORITHM)


def gradients(model: PreTrainedModel | TrainEngine) -> dict[str, Tensor]:
    if isinstance(model, RemoteEngine):
        return model.gradients()
    module = model.model if isinstance(model, SingleDevice) else model
    assert isinstance(module, PreTrainedModel)
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def weights_of(engine: TrainEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.export_weights()}


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("limit", [1, 40, 4096])
def test_logprobs_match_plain_forward_of_each_row(
    build: EngineFactory, name: str, limit: int
) -> None:
    model, batch = tiny(name), random_batch()
    with torch.no_grad():
        expected, _ = plain_logprobs(copy.deepcopy(model), batch)
    settings = TrainSettings(micro_batch_tokens=limit)
    found = build(model, settings, temperature=TEMPERATURE).logprobs(batch)
    assert np.abs(found[batch.mask] - expected.numpy()).max() < 1e-5
    assert not found[~batch.mask].any()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("limit", "checkpointing"), [(1, True), (40, False), (4096, False)])
def test_gradient_matches_plain_loss_for_any_micro_batch_size(
    build: EngineFactory, name: str, limit: int, checkpointing: bool
) -> None:
    model, batch = tiny(name), random_batch()
    reference = copy.deepcopy(model)
    logprobs, entropy = plain_logprobs(reference, batch)
    keep = batch.mask

    def pick(array: FloatArray | None) -> Tensor:
        assert array is not None
        return torch.from_numpy(array[keep])

    data = TokenData(
        torch.from_numpy(np.repeat(np.arange(batch.num_rows), batch.lengths)[keep]),
        pick(LOSS.weights(batch)),
        pick(batch.logprobs),
        torch.from_numpy(batch.versions[keep]),
        pick(batch.advantages),
        ref_logprobs=pick(batch.ref_logprobs),
    )
    loss = LOSS(TokenOutputs(logprobs, entropy), data).loss
    loss.backward()
    counted = Counted(LOSS)
    settings = TrainSettings(micro_batch_tokens=limit, gradient_checkpointing=checkpointing)
    engine = build(model, settings, temperature=TEMPERATURE)
    metrics = engine.forward_backward(batch, counted)
    assert not isinstance(engine, SingleDevice) or counted.calls == {1: 5, 40: 2, 4096: 1}[limit]
    assert metrics["loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    found, expected = gradients(engine), gradients(reference)
    assert found.keys() == expected.keys()
    for parameter, gradient in expected.items():
        assert (found[parameter] - gradient).abs().max() < 1e-6, parameter


def test_metrics_do_not_depend_on_micro_batch_size(build: EngineFactory) -> None:
    batch = random_batch()
    one, some, all_ = (
        build(tiny("qwen2"), TrainSettings(micro_batch_tokens=limit)).forward_backward(batch, LOSS)
        for limit in (1, 40, 4096)
    )
    assert one == pytest.approx(all_, abs=1e-5) and some == pytest.approx(all_, abs=1e-5)


def test_gradients_accumulate_over_batches(build: EngineFactory) -> None:
    engine, once = build(tiny("llama"), TrainSettings()), build(tiny("llama"), TrainSettings())
    once.forward_backward(random_batch(), LOSS)
    for _ in range(2):
        engine.forward_backward(random_batch(), LOSS)
    twice = gradients(engine)
    for name, gradient in gradients(once).items():
        assert (twice[name] - 2 * gradient).abs().max() < 1e-6


def test_optimizer_step_clips_gradient_before_update(build: EngineFactory, tmp_path: Path) -> None:
    engine = build(tiny("qwen2"), TrainSettings(max_grad_norm=1e-3))
    engine.forward_backward(random_batch(), LOSS)
    expected = math.sqrt(sum(float(g.double().square().sum()) for g in gradients(engine).values()))
    before = weights_of(engine)
    assert engine.optimizer_step(1e-3) == pytest.approx(expected, rel=1e-5)
    assert not gradients(engine) and not same_bits(before, weights_of(engine))
    engine.save(tmp_path)
    moments = [
        tensor
        for file in (tmp_path / "training/actor").iterdir()
        for key, tensor in load_file(file).items()
        if key.startswith("exp_avg:")
    ]
    assert math.sqrt(sum(float(m.square().sum()) for m in moments)) == pytest.approx(
        0.1 * 1e-3, rel=1e-2
    )


@pytest.mark.fault("E1", "NaN in the gradient, weights and optimizer compared bit for bit")
def test_optimizer_step_changes_nothing_when_gradient_is_not_finite(
    build: EngineFactory, fault: Fault
) -> None:
    engine, clean = build(tiny("qwen2"), TrainSettings()), build(tiny("qwen2"), TrainSettings())
    batch = random_batch()
    assert batch.advantages is not None
    broken = replace(batch, advantages=np.where(batch.mask, np.float32(math.nan), batch.advantages))
    before = weights_of(engine)
    engine.forward_backward(broken, LOSS)
    assert math.isnan(engine.optimizer_step(1e-3))
    fault.fired()
    assert same_bits(before, weights_of(engine))
    for each in (engine, clean):
        each.forward_backward(batch, LOSS)
        each.optimizer_step(1e-3)
    assert same_bits(weights_of(clean), weights_of(engine)), (
        "the skipped step must not change the gradient or the optimizer state"
    )


def test_optimizer_step_only_clears_gradient_when_it_is_skipped(build: EngineFactory) -> None:
    engine, clean = build(tiny("qwen2"), TrainSettings()), build(tiny("qwen2"), TrainSettings())
    before = weights_of(engine)
    for each, skip in ((engine, True), (clean, False)):
        each.forward_backward(random_batch(), LOSS)
        norm = each.optimizer_step(0.0, skip)
        assert norm > 0
    assert same_bits(before, weights_of(engine))
    fresh = build(tiny("qwen2"), TrainSettings())
    for each in (engine, fresh):
        each.forward_backward(random_batch(seed=1), LOSS)
        each.optimizer_step(1e-3)
    assert same_bits(weights_of(fresh), weights_of(engine))


def test_training_is_deterministic(build: EngineFactory) -> None:
    results = []
    for _ in range(2):
        engine = build(tiny("qwen3"), TrainSettings(micro_batch_tokens=40))
        for seed in range(3):
            engine.forward_backward(random_batch(seed=seed), LOSS)
            engine.optimizer_step(1e-3)
        results.append(weights_of(engine))
    assert same_bits(*results)


@pytest.mark.parametrize("name", MODELS)
def test_exported_weights_give_same_logprobs_in_plain_model(
    build: EngineFactory, name: str
) -> None:
    engine, batch = build(tiny(name), TrainSettings(), temperature=TEMPERATURE), random_batch()
    engine.forward_backward(batch, LOSS)
    engine.optimizer_step(1e-2)
    exported = weights_of(engine)
    assert "lm_head.weight" in exported and "model.embed_tokens.weight" in exported
    fresh = tiny(name)
    assert set(exported) == set(fresh.state_dict())
    fresh.load_state_dict(exported)
    with torch.no_grad():
        expected, _ = plain_logprobs(fresh, batch)
    assert np.abs(engine.logprobs(batch)[batch.mask] - expected.numpy()).max() < 1e-5


@pytest.mark.parametrize("head", ["policy", "value"])
def test_loaded_engine_continues_training_bit_for_bit(
    build: EngineFactory, head: str, tmp_path: Path
) -> None:
    loss = LOSS if head == "policy" else ValueLoss(0.2)

    def fresh() -> TrainEngine:
        model = tiny("qwen2-tied")
        return build(
            model if head == "policy" else model.base_model,
            TrainSettings(weight_decay=0.1),
            head=head,
        )

    def train(engine: TrainEngine, seed: int) -> None:
        engine.forward_backward(random_batch(seed=seed), loss)
        engine.optimizer_step(1e-2)

    engine, batch = fresh(), random_batch()
    train(engine, 0)
    train(engine, 1)
    engine.save(tmp_path / "saved")
    train(engine, 2)
    resumed = fresh()
    resumed.load(tmp_path / "saved")
    train(resumed, 2)
    assert same_bits(weights_of(engine), weights_of(resumed))
    read = TrainEngine.logprobs if head == "policy" else TrainEngine.values
    assert (getattr(engine, read.__name__)(batch) == getattr(resumed, read.__name__)(batch)).all()
    role = "actor" if head == "policy" else "critic"
    names = [""] if build is SingleDevice else ["-00001-of-00002", "-00002-of-00002"]
    index = [] if build is SingleDevice else [f"saved/{role}/model.safetensors.index.json"]
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")} == {
        f"saved/{role}/config.json",
        *index,
        *(f"saved/{role}/model{name}.safetensors" for name in names),
        *(f"saved/training/{role}/optimizer{name}.safetensors" for name in names),
    }


def test_saved_policy_loads_with_transformers(build: EngineFactory, tmp_path: Path) -> None:
    engine = build(tiny("qwen2-tied"), TrainSettings(), temperature=TEMPERATURE)
    batch = random_batch()
    engine.save(tmp_path)
    opened = Qwen2ForCausalLM.from_pretrained(tmp_path / "actor")
    with torch.no_grad():
        expected, _ = plain_logprobs(opened, batch)
    assert np.abs(engine.logprobs(batch)[batch.mask] - expected.numpy()).max() < 1e-5


@pytest.mark.fault("C8", "train engine loads the checkpoint of another model, half a file, no file")
def test_load_changes_nothing_when_checkpoint_is_unusable(
    build: EngineFactory, tmp_path: Path, fault: Fault
) -> None:
    build(tiny("llama"), TrainSettings()).save(tmp_path / "llama")
    engine = build(tiny("qwen2"), TrainSettings())
    before = weights_of(engine)
    with pytest.raises(CheckpointError, match="another model"):
        engine.load(tmp_path / "llama")
    (tmp_path / "truncated" / "actor").mkdir(parents=True)
    (tmp_path / "truncated" / "actor" / "model.safetensors").write_bytes(b"half a file")
    with pytest.raises(CheckpointError, match="truncated"):
        engine.load(tmp_path / "truncated")
    with pytest.raises(CheckpointError, match="missing"):
        engine.load(tmp_path / "missing")
    fault.fired()
    assert same_bits(before, weights_of(engine))


def test_forward_backward_rejects_batch_without_trained_tokens(build: EngineFactory) -> None:
    batch = random_batch()
    with pytest.raises(DataError, match="no trained token"):
        build(tiny("llama"), TrainSettings()).forward_backward(
            replace(batch, mask=np.zeros_like(batch.mask)), LOSS
        )


def test_values_start_at_zero_and_learn_returns(build: EngineFactory) -> None:
    engine, batch = build(tiny("qwen2").base_model, TrainSettings(), head="value"), random_batch()
    assert batch.returns is not None
    assert not engine.values(batch).any()
    errors = []
    for _ in range(60):
        errors.append(engine.forward_backward(batch, ValueLoss(None))["value_error"])
        engine.optimizer_step(1e-2)
    assert errors[0] == pytest.approx(float(np.square(batch.returns[batch.mask]).mean()), rel=1e-5)
    assert errors[-1] < errors[0] / 10


def test_offload_and_restore_keep_engine_unchanged(build: EngineFactory) -> None:
    engine = build(tiny("qwen2"), TrainSettings())
    engine.forward_backward(random_batch(), LOSS)
    before = weights_of(engine)
    offloaded, restored = engine.place("host"), engine.place("device")
    assert offloaded.bytes == restored.bytes == 0, "an engine on a CPU moves nothing"
    assert offloaded.seconds >= 0
    assert same_bits(before, weights_of(engine)) and engine.optimizer_step(1e-3) > 0


def truncated(log_weight: Tensor) -> Tensor:
    """Return the weights of correction = "truncate"."""
    return log_weight.exp().clamp(0.0, 2.0)


@pytest.mark.parametrize("given", ["function", "file"])
def test_custom_loss_gives_gradient_of_built_in_loss(build: EngineFactory, given: str) -> None:
    batch, custom = random_batch(), clip if given == "function" else "examples/custom_loss.py:clip"
    found, expected = (
        build(tiny("qwen2"), TrainSettings(micro_batch_tokens=40), temperature=TEMPERATURE)
        for _ in range(2)
    )
    settings = ALGORITHM.model_dump() | {"loss": custom}
    custom_loss = PolicyLoss(AlgorithmSettings.model_validate(settings))
    metrics = found.forward_backward(batch, custom_loss)
    assert metrics == pytest.approx(expected.forward_backward(batch, LOSS), abs=1e-6)
    assert same_bits(gradients(found), gradients(expected))


def test_custom_correction_gives_weights_of_built_in_one(build: EngineFactory) -> None:
    trained = []
    for correction in ("truncate", truncated):
        engine = build(tiny("qwen2"), TrainSettings(learning_rate=1e-3), temperature=TEMPERATURE)
        settings = {"correction": correction, "epochs": 2}
        algorithm = AlgorithmSettings.model_validate(settings)
        metrics = Actor(engine, algorithm, TrainSettings(), 10).update(random_batch(), 0)
        trained.append((metrics, weights_of(engine)))
    assert trained[0][0] == pytest.approx(trained[1][0], nan_ok=True)
    assert same_bits(trained[0][1], trained[1][1])


def test_custom_correction_does_not_depend_on_micro_batch_size(build: EngineFactory) -> None:
    algorithm = AlgorithmSettings.model_validate({"correction": mean_one})
    one, all_ = (
        Actor(
            build(tiny("qwen2"), TrainSettings(micro_batch_tokens=limit)),
            algorithm,
            TrainSettings(),
            10,
        ).update(random_batch(), 0)
        for limit in (1, 4096)
    )
    assert one == pytest.approx(all_, abs=1e-5)


def test_wrong_custom_loss_is_config_error_that_names_it(build: EngineFactory) -> None:
    algorithm = AlgorithmSettings.model_validate({"loss": lambda logprobs: logprobs.mean()})
    actor = Actor(build(tiny("qwen2"), TrainSettings()), algorithm, TrainSettings(), 10)
    with pytest.raises(ConfigError, match=r"<lambda>' returned a .* of shape \(\)"):
        actor.update(random_batch(), 0)
