"""Models in GGUF format: a GGUF file, or a directory with one."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.data import tiny
from paceline.data.tiny import resolve_model
from paceline.errors import ModelError
from paceline.model import loading
from paceline.model.loading import (
    load_generation_config,
    load_model,
    load_tokenizer,
    model_fingerprint,
)
from paceline.training.settings import TrainSettings
from paceline.training.single import SingleDevice

pytest.importorskip("gguf")
from tests.gguf_files import write_gguf


def test_gguf_file_gives_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read: list[str] = []
    monkeypatch.setattr(
        loading,
        "_read_config",
        lambda source, original=loading._read_config: read.append(source) or original(source),
    )
    tokenizer = tiny.make_tokenizer()
    model = tiny.make_model(replace(tiny.Recipe("sort:5"), max_steps=2, hidden=192), tokenizer)
    write_gguf(tmp_path / "tiny.gguf", model, tokenizer)
    loaded = load_model(str(tmp_path))
    ids = torch.tensor([tokenizer("sort 31=").input_ids])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    text = load_tokenizer(str(tmp_path)).decode(ids[0].tolist(), skip_special_tokens=True)
    assert text == "sort 31="
    assert len(model_fingerprint(str(tmp_path))) == 64
    assert len(read) == 1, "reading the configuration takes seconds, so it must happen once"
    assert "GGUF" not in capsys.readouterr().err, (
        "the log of a worker must not contain a progress bar"
    )
    # The model can be trained, and is saved in the format of transformers.
    SingleDevice(loaded, TrainSettings()).save(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(
            load_model(str(tmp_path / "actor"))(ids).logits, model(ids).logits
        )


def test_gguf_file_is_selected_by_path_when_directory_has_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    tokenizer = tiny.make_tokenizer()
    models = {
        name: tiny.make_model(replace(tiny.Recipe("sort:5"), max_steps=1, seed=seed), tokenizer)
        for seed, name in enumerate(("a.gguf", "b [q4].gguf"))
    }
    for name, model in models.items():
        write_gguf(tmp_path / name, model, tokenizer)
    with pytest.raises(ModelError, match=r"2 GGUF files; select one: model=.*\.gguf"):
        load_model(str(tmp_path))
    ids = torch.tensor([tokenizer("sort 31=").input_ids])
    for name, model in models.items():
        source = resolve_model(str(tmp_path / name))
        with torch.no_grad():
            torch.testing.assert_close(load_model(source)(ids).logits, model(ids).logits)
        assert load_tokenizer(source).decode(ids[0, 1:].tolist()) == "sort 31="
        assert load_generation_config(source).eos_token_id == 2
    first, second = (model_fingerprint(str(tmp_path / name)) for name in models)
    assert first != second
