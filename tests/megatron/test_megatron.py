"""The Megatron engine matches a single device in every layout and shares its checkpoints."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from transformers import PreTrainedModel

from examples.custom_advantage import minus_median
from examples.custom_correction import mean_one
from examples.custom_loss import clip
from paceline.algo.advantage import advantages
from paceline.algo.loss import LossFn, PolicyLoss, ValueLoss
from paceline.algo.settings import AlgorithmSettings
from paceline.errors import CheckpointError, ConfigError, DataError, ModelError
from paceline.model.packing import select_rows
from paceline.model.tensor_file import TensorFiles
from paceline.training.actor import Actor
from paceline.training.engine import TrainEngine
from paceline.training.fsdp import Fsdp
from paceline.training.settings import TrainSettings
from paceline.training.single import SingleDevice
from paceline.types import Batch, Request, Sampling
from tests.contract.test_train_engine import (
    MODELS,
    TEMPERATURE,
    VOCABULARY,
    random_batch,
    same_bits,
    tiny,
    weights_of,
)
from tests.megatron.factory import make
from tests.ranks import Ranks
from tests.unit.test_native_engine import engine_of, run

Layout = dict[str, Any]
LAYOUTS: dict[str, Layout] = {
    "dp2": {},
    "tp2": {"tensor": 2, "sequence_parallel": False},
    "tp2-sp": {"tensor": 2},
    "pp2": {"pipeline": 2},
}
LARGE: dict[str, Layout] = {
    "tp2-pp2-sp": {"tensor": 2, "pipeline": 2},
    "tp2-sp-dp2": {"tensor": 2},
    "pp2-dp2": {"pipeline": 2},
}
SETTINGS = TrainSettings(micro_batch_tokens=20, weight_decay=0.1)
GRPO = PolicyLoss(AlgorithmSettings(kl_coef=0.1, entropy_coef=0.01, aggregation="sequence"))
PPO = PolicyLoss(AlgorithmSettings(name="ppo"))
CUSTOM = PolicyLoss(AlgorithmSettings.model_validate(GRPO.settings.model_dump() | {"loss": clip}))
# Small, because Adam's first step has the size of the rate even where the gradient is only noise.
LR = 1e-4


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(make, 2, tmp_path_factory.mktemp("pair"))
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(make, 4, tmp_path_factory.mktemp("four"))
    yield ranks
    ranks.close()


def single_device(
    name: str, head: str = "policy", settings: TrainSettings = SETTINGS
) -> SingleDevice:
    model = tiny(name)
    return SingleDevice(
        model if head == "policy" else model.base_model, settings, TEMPERATURE, head
    )  # type: ignore[arg-type]


def in_ranks(
    ranks: Ranks,
    name: str,
    layout: Layout,
    head: str = "policy",
    settings: TrainSettings = SETTINGS,
    **more: Any,
) -> TrainEngine:
    return ranks(tiny(name), settings, temperature=TEMPERATURE, head=head, **layout, **more)


def learn(engine: TrainEngine, batch: Batch, loss: LossFn) -> tuple[dict[str, float], float]:
    return engine.forward_backward(batch, loss), engine.optimizer_step(LR)


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def assert_step_matches(
    engine: TrainEngine,
    reference: SingleDevice,
    loss: LossFn,
    folder: Path,
    batch: Batch | None = None,
) -> None:
    """Compare loss, metrics, gradient norm, and the resulting weights and optimizer state."""
    batch = batch or random_batch()
    found, expected = learn(engine, batch, loss), learn(reference, batch, loss)
    assert found[0] == pytest.approx(expected[0], abs=1e-5)
    assert found[1] == pytest.approx(expected[1], abs=1e-5)
    engine.save(folder / "ranks")
    reference.save(folder / "one")
    for pattern, limit in (("*/model*.safetensors", 1e-5), ("*/*/optimizer*.safetensors", 1e-6)):
        ranks, one = (
            dict(TensorFiles(sorted((folder / name).glob(pattern)))) for name in ("ranks", "one")
        )
        assert difference(ranks, one) < limit


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_grpo_step_matches_single_device(
    pair: Ranks, name: str, layout: str, tmp_path: Path
) -> None:
    engine, reference = in_ranks(pair, name, LAYOUTS[layout]), single_device(name)
    assert np.abs(engine.logprobs(random_batch()) - reference.logprobs(random_batch())).max() < 1e-5
    assert_step_matches(engine, reference, GRPO, tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_custom_loss_gives_step_of_built_in_loss(pair: Ranks, layout: str, tmp_path: Path) -> None:
    engine = in_ranks(pair, "qwen2", LAYOUTS[layout])
    found = learn(engine, random_batch(), CUSTOM)
    expected = learn(single_device("qwen2"), random_batch(), GRPO)
    assert found[0] == pytest.approx(expected[0], abs=1e-5)
    assert found[1] == pytest.approx(expected[1], abs=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_custom_advantage_with_correction_gives_update_of_single_device(
    pair: Ranks, layout: str
) -> None:
    custom = {"advantage": minus_median, "correction": mean_one, "epochs": 2}
    algorithm = AlgorithmSettings.model_validate(custom)
    batch = advantages(random_batch(), algorithm)
    plain = Actor(single_device("qwen2"), AlgorithmSettings(epochs=2), SETTINGS, 10)
    built_in = plain.update(random_batch(), 0)
    found, expected = (
        Actor(engine, algorithm, SETTINGS, 10).update(batch, 0)
        for engine in (in_ranks(pair, "qwen2", LAYOUTS[layout]), single_device("qwen2"))
    )
    assert found == pytest.approx(expected, abs=1e-5, nan_ok=True)
    assert found["loss"] != pytest.approx(built_in["loss"], abs=1e-3), "they must have an effect"


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_wrong_custom_correction_is_config_error_that_names_it(pair: Ranks, layout: str) -> None:
    wrong = AlgorithmSettings.model_validate({"correction": lambda log_weight: -log_weight.exp()})
    actor = Actor(in_ranks(pair, "qwen2", LAYOUTS[layout]), wrong, SETTINGS, 10)
    with pytest.raises(ConfigError, match="<lambda>' returned a negative weight"):
        actor.update(random_batch(), 0)


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_wrong_custom_loss_is_config_error_that_names_it(pair: Ranks, layout: str) -> None:
    wrong = AlgorithmSettings.model_validate({"loss": lambda logprobs: logprobs / 0})
    with pytest.raises(ConfigError, match="<lambda>' returned NaN or infinity"):
        in_ranks(pair, "qwen2", LAYOUTS[layout]).forward_backward(random_batch(), PolicyLoss(wrong))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ppo_step_matches_single_device(pair: Ranks, layout: str, tmp_path: Path) -> None:
    assert_step_matches(
        in_ranks(pair, "qwen2", LAYOUTS[layout]), single_device("qwen2"), PPO, tmp_path / "actor"
    )
    critic, reference = (
        in_ranks(pair, "qwen2", LAYOUTS[layout], "value"),
        single_device("qwen2", "value"),
    )
    assert not critic.values(random_batch()).any(), "initial values must be 0"
    assert_step_matches(critic, reference, ValueLoss(0.2), tmp_path / "critic")
    assert np.abs(critic.values(random_batch()) - reference.values(random_batch())).max() < 1e-5
    assert reference.values(random_batch()).any()


@pytest.mark.parametrize("layout", LARGE)
@pytest.mark.parametrize("head", ["policy", "value"])
def test_step_on_four_ranks_matches_single_device(
    four: Ranks, layout: str, head: str, tmp_path: Path
) -> None:
    name = {"tp2-pp2-sp": "qwen3", "tp2-sp-dp2": "qwen2", "pp2-dp2": "qwen2-tied"}[layout]
    loss = GRPO if head == "policy" else ValueLoss(0.2)
    assert_step_matches(
        in_ranks(four, name, LARGE[layout], head), single_device(name, head), loss, tmp_path
    )


@pytest.mark.parametrize("planted", ["qkv", "mask"])
def test_comparison_detects_planted_layout_errors(
    pair: Ranks, planted: str, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError):
        assert_step_matches(
            in_ranks(pair, "llama", LAYOUTS["tp2"], planted=planted),
            single_device("llama"),
            GRPO,
            tmp_path,
        )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_exported_weights_equal_imported_weights(pair: Ranks, name: str, layout: str) -> None:
    assert same_bits(
        weights_of(in_ranks(pair, name, LAYOUTS[layout])), dict(tiny(name).state_dict())
    )


@pytest.mark.parametrize("layout", ["tp2-sp", "pp2"])
def test_gradient_checkpointing_gives_same_gradient(
    pair: Ranks, layout: str, tmp_path: Path
) -> None:
    settings = SETTINGS.model_copy(update={"gradient_checkpointing": True})
    assert_step_matches(
        in_ranks(pair, "qwen3", LAYOUTS[layout], settings=settings),
        single_device("qwen3"),
        GRPO,
        tmp_path,
    )


@pytest.mark.parametrize("recompute", [False, True])
def test_bfloat16_approximates_single_device(pair: Ranks, recompute: bool) -> None:
    settings = SETTINGS.model_copy(
        update={"dtype": "bfloat16", "gradient_checkpointing": recompute}
    )
    engine, reference = (
        in_ranks(pair, "qwen2", LAYOUTS["tp2-sp"], settings=settings),
        single_device("qwen2", settings=settings),
    )
    found, expected = learn(engine, random_batch(), GRPO), learn(reference, random_batch(), GRPO)
    assert found[0]["loss"] == pytest.approx(expected[0]["loss"], rel=0.05)
    assert found[1] == pytest.approx(expected[1], rel=0.05)


def test_step_matches_single_device_when_replica_has_no_rows(pair: Ranks, tmp_path: Path) -> None:
    batch = random_batch()
    longest = select_rows(batch, np.array([int(batch.lengths.argmax())]))
    assert_step_matches(
        in_ranks(pair, "qwen2", LAYOUTS["dp2"]), single_device("qwen2"), GRPO, tmp_path, longest
    )


def test_gradients_accumulate_over_batches(pair: Ranks) -> None:
    engine, reference = in_ranks(pair, "qwen2", LAYOUTS["dp2"]), single_device("qwen2")
    for each in (engine, reference):
        each.forward_backward(random_batch(seed=1), GRPO)
    assert learn(engine, random_batch(), GRPO)[1] == pytest.approx(
        learn(reference, random_batch(), GRPO)[1], abs=1e-5
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_optimizer_step_changes_nothing_when_gradient_is_not_finite(
    pair: Ranks, layout: str
) -> None:
    engine, batch = in_ranks(pair, "qwen2", LAYOUTS[layout]), random_batch()
    assert batch.advantages is not None
    # Only one row, and therefore only one replica, has a gradient that is not finite.
    row = np.repeat(np.arange(batch.num_rows), batch.lengths) == batch.lengths.argmax()
    broken = replace(batch, advantages=np.where(row, np.float32(math.nan), batch.advantages))
    before = weights_of(engine)
    assert math.isnan(learn(engine, broken, GRPO)[1])
    assert same_bits(before, weights_of(engine))
    clean = single_device("qwen2")
    assert learn(engine, batch, GRPO)[0]["loss"] == pytest.approx(
        learn(clean, batch, GRPO)[0]["loss"], abs=1e-5
    )
    assert difference(weights_of(clean), weights_of(engine)) < 1e-5, (
        "the skipped step must not change the gradient or the optimizer state"
    )


@pytest.mark.parametrize("head", ["policy", "value"])
def test_checkpoint_continues_in_any_layout(pair: Ranks, head: str, tmp_path: Path) -> None:
    loss = GRPO if head == "policy" else ValueLoss(0.2)
    saved = in_ranks(pair, "qwen2-tied", LAYOUTS["tp2-sp"], head)
    for seed in range(2):
        learn(saved, random_batch(seed=seed), loss)
    saved.save(tmp_path / "saved")
    expected = learn(saved, random_batch(seed=2), loss)
    weights = weights_of(saved)
    one = single_device("qwen2-tied", head)
    one.save(tmp_path / "fresh")
    for layout in ("single", "tp2-sp", "tp2", "pp2", "dp2"):
        engine = one if layout == "single" else in_ranks(pair, "qwen2-tied", LAYOUTS[layout], head)
        learn(engine, random_batch(seed=9), loss)  # `load` must overwrite this step
        engine.load(tmp_path / "saved")
        found = learn(engine, random_batch(seed=2), loss)
        assert found[0]["loss"] == pytest.approx(expected[0]["loss"], abs=1e-5), layout
        assert found[1] == pytest.approx(expected[1], abs=1e-5), layout
        assert difference(weights_of(engine), weights) < 1e-5, layout
        if layout == "tp2-sp":
            assert same_bits(weights_of(engine), weights), "the same layout must give the same bits"
    engine.load(tmp_path / "fresh")  # a single device's checkpoint before its first step
    assert difference(weights_of(engine), weights_of(single_device("qwen2-tied", head))) == 0.0


def make_fsdp(model: PreTrainedModel, settings: TrainSettings) -> Fsdp:
    return Fsdp(model, settings, TEMPERATURE)


def test_checkpoint_moves_between_megatron_and_fsdp(pair: Ranks, tmp_path: Path) -> None:
    megatron = in_ranks(pair, "qwen2", LAYOUTS["tp2-sp"])
    fsdp = pair(tiny("qwen2"), SETTINGS, make=make_fsdp)
    for engine, other, name in ((megatron, fsdp, "one"), (fsdp, megatron, "two")):
        learn(engine, random_batch(seed=1), GRPO)
        engine.save(tmp_path / name)
        other.load(tmp_path / name)
        assert same_bits(weights_of(engine), weights_of(other))
        expected, found = (learn(each, random_batch(seed=2), GRPO) for each in (engine, other))
        assert found[1] == pytest.approx(expected[1], abs=1e-5)


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_opened_model_has_weights_of_its_files(pair: Ranks, layout: str, tmp_path: Path) -> None:
    tiny("qwen2").save_pretrained(tmp_path, max_shard_size="10KB")
    opened = in_ranks(pair, "llama", LAYOUTS[layout], path=str(tmp_path))
    assert same_bits(weights_of(opened), dict(tiny("qwen2").state_dict()))


def test_load_changes_nothing_when_checkpoint_is_unusable(pair: Ranks, tmp_path: Path) -> None:
    single_device("llama").save(tmp_path / "llama")
    engine = in_ranks(pair, "qwen2", LAYOUTS["pp2"])
    before = weights_of(engine)
    for folder, reason in (("llama", "another model"), ("missing", "missing")):
        with pytest.raises(CheckpointError, match=reason):
            engine.load(tmp_path / folder)
    assert same_bits(before, weights_of(engine))


def greedy(engine: TrainEngine, prompt: list[int], count: int) -> list[int]:
    """Return the trainer's most likely tokens, by the log-probs of all continuations."""
    tokens = list(prompt)
    for _ in range(count):
        rows = np.array([[*tokens, last] for last in range(VOCABULARY)], np.int32)
        mask = np.zeros(rows.shape, np.bool_)
        mask[:, -1] = True
        zeros = np.zeros(rows.size, np.float32)
        lengths = np.full(VOCABULARY, rows.shape[1], np.int32)
        batch = Batch(
            rows.ravel(),
            lengths,
            mask.ravel(),
            zeros,
            rows.ravel(),
            np.zeros(VOCABULARY, np.float32),
            lengths,
        )
        tokens.append(int(engine.logprobs(batch)[mask.ravel()].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_native_engine_samples_trainers_most_likely_tokens(pair: Ranks, layout: str) -> None:
    engine, prompt = (
        in_ranks(pair, "qwen3", LAYOUTS[layout], settings=TrainSettings()),
        [3, 1, 4, 1, 5],
    )
    learn(engine, random_batch(), GRPO)
    model = tiny("qwen3")
    model.load_state_dict(weights_of(engine))
    completion = run(
        engine_of(model), [Request("greedy", tuple(prompt), 0, Sampling(6, temperature=0.0))]
    )["greedy"]
    assert completion.tokens.tolist() == greedy(engine, prompt, 6)


def test_engine_rejects_unsupported_layouts_models_and_batches(pair: Ranks) -> None:
    from paceline.training.megatron.decoder import transformer_config

    config = tiny("qwen2").config
    with pytest.raises(
        ConfigError, match="pipeline_parallel = 3 does not divide the model's num_hidden_layers = 2"
    ):
        transformer_config(config, TrainSettings(backend="megatron", pipeline_parallel=3), False)
    with pytest.raises(
        ConfigError, match="tensor_parallel = 4 does not divide the model's num_key_value_heads = 2"
    ):
        transformer_config(config, TrainSettings(backend="megatron", tensor_parallel=4), False)
    config.model_type = "gemma"
    with pytest.raises(ModelError, match="is a gemma"):
        transformer_config(config, SETTINGS, False)
    with pytest.raises(ConfigError, match="2 ranks cannot be divided"):
        in_ranks(pair, "qwen2", {"tensor": 2, "pipeline": 2})
    with pytest.raises(DataError, match="no trained token"):
        batch = random_batch()
        in_ranks(pair, "qwen2", {}).forward_backward(
            replace(batch, mask=np.zeros_like(batch.mask)), GRPO
        )
    with pytest.raises(ModelError, match="a policy has no values"):
        in_ranks(pair, "qwen2", {}).values(random_batch())
