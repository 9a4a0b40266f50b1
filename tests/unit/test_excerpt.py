"""Excerpts of models compute like the whole, with fewer layers and rows of the vocabulary."""

from pathlib import Path

import pytest
import torch

from paceline.model.excerpt import ROWS, excerpt
from paceline.model.loading import load_model
from paceline.model.stored_weights import open_stored
from paceline.training.head import PolicyHead
from paceline.training.packed import PackedModel
from paceline.training.settings import TrainSettings
from paceline.training.sharding import decoder_layers
from tests.architectures import ARCHITECTURES, tiny_architecture

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_excerpt_shows_what_whole_model_shows(name: str, tmp_path: Path) -> None:
    more = {"vocab_size_per_layer_input": 2 * ROWS} if name == "gemma3n_text" else {}
    tiny_architecture(name, vocab_size=2 * ROWS, **more).save_pretrained(tmp_path)
    opened = open_stored(str(tmp_path))
    assert opened is not None
    part = excerpt(opened[0], decoder_layers, opened[1], CPU)
    checked = PackedModel(part, TrainSettings())
    expected = PackedModel(load_model(str(tmp_path)), TrainSettings())
    assert checked._padded == expected._padded
    assert isinstance(checked.head, PolicyHead) and isinstance(expected.head, PolicyHead)
    assert len(checked.head.output.weight) == ROWS
    assert checked.head._temperature == pytest.approx(expected.head._temperature, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "count", "kept"), [("llama4_text", 6, 2), ("qwen3_moe", 6, 1), ("deepseek_v3", 6, 2)]
)
def test_excerpt_has_layer_of_every_kind(name: str, count: int, kept: int, tmp_path: Path) -> None:
    more = {"no_rope_layers": [1, 0] * 3} if name == "llama4_text" else {}
    tiny_architecture(name, num_hidden_layers=count, **more).save_pretrained(tmp_path)
    opened = open_stored(str(tmp_path))
    assert opened is not None
    part = excerpt(opened[0], decoder_layers, opened[1], CPU)
    layers: torch.nn.ModuleList = part.model.layers  # type: ignore[assignment]
    assert len(layers) == kept
