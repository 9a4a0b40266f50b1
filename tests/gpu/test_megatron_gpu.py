"""The Megatron engine on a GPU: agreement with a single device, and offloading."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from paceline.training.engine import TrainEngine
from paceline.training.settings import TrainSettings
from paceline.training.single import SingleDevice
from tests.contract.test_train_engine import LOSS, random_batch, same_bits, tiny, weights_of
from tests.ranks import Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or find_spec("megatron") is None,
        reason="needs a GPU and megatron-core",
    ),
]


def make(model: PreTrainedModel, settings: TrainSettings, **options: Any) -> TrainEngine:
    from paceline.training.megatron.engine import Megatron

    return Megatron(model.config, model.state_dict(), settings, **options)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    made = Ranks(make, 1, tmp_path_factory.mktemp("ranks"), backend="megatron")
    yield made
    made.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", [False, True])
def test_one_megatron_rank_trains_like_single_device(
    ranks: Ranks, dtype: str, recompute: bool, tmp_path: Path
) -> None:
    settings, batch = TrainSettings(dtype=dtype, gradient_checkpointing=recompute), random_batch()
    single, megatron = SingleDevice(tiny("qwen3").cuda(), settings), ranks(tiny("qwen3"), settings)
    one, two = (engine.forward_backward(batch, LOSS)["loss"] for engine in (single, megatron))
    tolerance = 1e-5 if dtype == "float32" else 0.05
    assert two == pytest.approx(one, abs=tolerance)
    assert megatron.optimizer_step(1e-4) == pytest.approx(
        single.optimizer_step(1e-4), rel=tolerance
    )
    megatron.save(tmp_path)
    single.load(tmp_path)
    assert same_bits(
        {name: weight.cpu() for name, weight in weights_of(single).items()}, weights_of(megatron)
    )


def test_offloaded_state_is_restored_unchanged(ranks: Ranks) -> None:
    engine = ranks(tiny("qwen2"), TrainSettings())
    engine.forward_backward(random_batch(), LOSS)
    engine.optimizer_step(1e-3)
    before = weights_of(engine)
    offloaded = engine.place("host")
    assert offloaded.bytes >= 4 * sum(weight.nbytes for weight in before.values()), (
        "parameters, gradients and two moments"
    )
    assert engine.place("device").bytes == offloaded.bytes
    assert same_bits(weights_of(engine), before)
