"""GGUF files are converted once, and the result is the model that transformers reads from them."""

import json
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.data.tiny import CHAT_TEMPLATE, make_tokenizer, resolve_model
from paceline.errors import ModelError
from paceline.model import gguf_cache
from paceline.model.get import get_model
from paceline.model.loading import (
    load_config,
    load_generation_config,
    load_model,
    load_tokenizer,
    model_fingerprint,
)
from paceline.model.stored_weights import open_stored

pytest.importorskip("gguf")
from paceline.model import gguf_conversion
from tests.gguf_files import random_gguf, write_gguf


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def greedy(source: str) -> list[int]:
    model, prompt = load_model(source), torch.tensor([load_tokenizer(source)("sort 31=").input_ids])
    tokens = model.generate(prompt, do_sample=False, max_new_tokens=16, pad_token_id=0)
    found: list[int] = tokens[0].tolist()
    return found


def stored_dtypes(folder: Path) -> dict[str, str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_slice(name).get_dtype() for name in file.offset_keys()}


def check_same(folder: Path, file: Path) -> None:
    """Compare a converted directory with what transformers reads from the GGUF file."""
    expected, found = load_model(str(file)).state_dict(), load_model(str(folder)).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert greedy(str(folder)) == greedy(str(file))
    ours, theirs = load_tokenizer(str(folder)), load_tokenizer(str(file))
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours("sort é 12=").input_ids == theirs("sort é 12=").input_ids
    assert ours.chat_template == theirs.chat_template
    assert ours.all_special_tokens == theirs.all_special_tokens
    ends = [load_generation_config(str(source)).eos_token_id for source in (folder, file)]
    assert ends[0] == ends[1] == 2


@pytest.mark.parametrize(
    ("kind", "stored"),
    [("F32", "F32"), ("F16", "F16"), ("BF16", "BF16"), ("Q8_0", "F32"), ("Q4_1", "F32")],
)
def test_converted_model_equals_model_of_gguf_file(
    kind: str, stored: str, tmp_path: Path, cache: Path
) -> None:
    file = random_gguf(tmp_path / "model.gguf", kind)
    folder = Path(resolve_model(str(file)))
    assert folder.parent == cache
    check_same(folder, file)
    dtypes = stored_dtypes(folder)
    assert dtypes["model.embed_tokens.weight"] == stored
    assert dtypes["model.norm.weight"] == "F32"
    assert "lm_head.weight" not in dtypes, "tied embeddings are stored once"
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["tie_word_embeddings"] and "quantization_config" not in config
    assert load_tokenizer(str(folder)).chat_template == CHAT_TEMPLATE
    assert open_stored(str(folder)), "each rank of a sharded trainer can read its part alone"


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_converted_llama_has_order_of_heads_of_transformers(
    kind: str, tmp_path: Path, cache: Path
) -> None:
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    file = tmp_path / "llama.gguf"
    write_gguf(file, LlamaForCausalLM(config), tokenizer, kind, "llama")
    folder = Path(resolve_model(str(file)))
    check_same(folder, file)
    assert "lm_head.weight" in stored_dtypes(folder), "the file has separate output weights"


def test_model_that_transformers_loads_as_whole_gives_same_files(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = random_gguf(tmp_path / "model.gguf")
    first = get_model(str(file), tmp_path / "first")
    monkeypatch.setattr(gguf_conversion, "SEPARATE", ())
    second = get_model(str(file), tmp_path / "second")
    tensors = [load_model(str(folder)).state_dict() for folder in (first, second)]
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
    assert sorted(stored_dtypes(first).items()) == sorted(stored_dtypes(second).items())


def test_conversion_reads_file_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    original = gguf_conversion._Reader.__init__

    def count(reader: object, path: str) -> None:
        read.append(path)
        original(reader, path)

    monkeypatch.setattr(gguf_conversion._Reader, "__init__", count)
    file = random_gguf(tmp_path / "model.gguf")
    monkeypatch.chdir(tmp_path)
    resolve_model("model.gguf")
    assert read == [str(file)]


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr(gguf_conversion, "write_model", write)


def test_second_start_uses_conversion(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = random_gguf(tmp_path / "model.gguf")
    folder = resolve_model(str(file))
    forbid(monkeypatch)
    assert resolve_model(str(file)) == folder
    (tmp_path / "link.gguf").symlink_to(file)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("link.gguf") == resolve_model("model.gguf") == folder


def test_directory_with_gguf_file_uses_its_conversion(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "model").mkdir()
    file = random_gguf(tmp_path / "model" / "a [q8].gguf")
    assert resolve_model(str(tmp_path / "model")) == resolve_model(str(file))


def test_changed_gguf_file_is_converted_again(tmp_path: Path, cache: Path) -> None:
    file = random_gguf(tmp_path / "model.gguf", seed=1)
    first, state = resolve_model(str(file)), file.stat()
    random_gguf(file, seed=2)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    second = resolve_model(str(file))
    assert file.stat().st_size == state.st_size
    assert model_fingerprint(first) != model_fingerprint(second)


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def flip(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        flip,
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: (folder / gguf_cache.MARK).write_text("{"),
        lambda folder: (folder / gguf_cache.MARK).unlink(),
    ],
    ids=["truncated", "flipped bit", "no tokenizer", "half-written list", "no list"],
)
def test_damaged_conversion_is_written_again(
    damage: Callable[[Path], None],
    tmp_path: Path,
    cache: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = random_gguf(tmp_path / "model.gguf")
    folder = Path(resolve_model(str(file)))
    expected = model_fingerprint(str(folder))
    damage(folder)
    assert resolve_model(str(file)) == str(folder)
    assert model_fingerprint(str(folder)) == expected
    assert f"{folder} is damaged or incomplete" in caplog.text


def test_interrupted_conversion_leaves_no_files(tmp_path: Path, cache: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    file = random_gguf(tmp_path / "model.gguf")
    with pytest.raises(KeyboardInterrupt):
        resolve_model(str(file), progress=interrupt)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def _convert(file: str, start: Barrier, done: "multiprocessing.Queue[tuple[str, bool]]") -> None:
    steps: list[int] = []
    start.wait(250)
    folder = resolve_model(file, progress=lambda *step: steps.append(step[0]))
    load_model(folder)
    done.put((folder, bool(steps)))


def test_two_processes_convert_file_once(tmp_path: Path, cache: Path) -> None:
    file = random_gguf(tmp_path / "model.gguf")
    context = multiprocessing.get_context("spawn")
    arguments = str(file), context.Barrier(2), context.Queue()
    other = context.Process(target=_convert, args=arguments)
    other.start()
    _convert(*arguments)
    results = [arguments[-1].get(timeout=120) for _ in range(2)]
    other.join(120)
    assert other.exitcode == 0
    assert results[0][0] == results[1][0]
    assert sorted(converted for _, converted in results) == [False, True]
    names = [path.name for path in cache.iterdir()]
    assert len(names) == 2, "the directory and its lock"


def test_remains_of_killed_process_are_removed(tmp_path: Path, cache: Path) -> None:
    file = random_gguf(tmp_path / "a [q8].gguf")
    folder = Path(resolve_model(str(file)))
    remains = cache / f".{folder.name}-killed"
    folder.rename(remains)
    resolve_model(str(file))
    assert folder.exists() and not remains.exists()


def test_directory_of_choice_is_written_once(tmp_path: Path, cache: Path) -> None:
    file, to = random_gguf(tmp_path / "model.gguf"), tmp_path / "out" / "model"
    assert get_model(str(file), to) == to
    check_same(to, file)
    stamp = (to / "model.safetensors").stat().st_mtime_ns
    assert get_model(str(file), to) == to
    assert (to / "model.safetensors").stat().st_mtime_ns == stamp
    assert not cache.exists()


def test_directory_with_other_files_is_not_overwritten(tmp_path: Path, cache: Path) -> None:
    file = random_gguf(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match="exists and is not a conversion of"):
        get_model(str(file), tmp_path)
    with pytest.raises(ModelError, match="is a Hugging Face directory already"):
        get_model(str(tmp_path / "model-original"))


def test_missing_space_is_reported_before_writing(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = random_gguf(tmp_path / "model.gguf")

    class Full:
        free = 1000

    monkeypatch.setattr(gguf_conversion.shutil, "disk_usage", lambda path: Full)
    with pytest.raises(ModelError, match=r"free space; .*set PACELINE_CACHE"):
        resolve_model(str(file))


def test_unwritable_cache_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = random_gguf(tmp_path / "model.gguf")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot write the conversion of .*set PACELINE_CACHE"):
        resolve_model(str(file))


@pytest.mark.parametrize("kept", [0.9, 0.01])
def test_incomplete_gguf_file_is_reported(kept: float, tmp_path: Path, cache: Path) -> None:
    file = random_gguf(tmp_path / "model.gguf")
    os.truncate(file, int(kept * file.stat().st_size))
    with pytest.raises(ModelError, match=r"cannot (load the model in|convert) .*model\.gguf"):
        resolve_model(str(file))
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_value_that_cannot_be_dequantized_is_reported(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise NotImplementedError("no such type")

    monkeypatch.setattr(gguf_conversion.gguf, "dequantize", fail)
    with pytest.raises(ModelError, match=r"cannot convert .*: no such type; the download may"):
        resolve_model(str(random_gguf(tmp_path / "model.gguf")))


def test_config_of_gguf_file_is_read_without_conversion(tmp_path: Path, cache: Path) -> None:
    file = random_gguf(tmp_path / "model.gguf")
    assert load_config(str(file)).hidden_size == 64
    assert not cache.exists()
