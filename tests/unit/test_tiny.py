"""Tiny model: reproducible, safe to create concurrently, loadable like any model."""

import multiprocessing
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.data import tiny
from paceline.data.tiny import resolve_model
from paceline.errors import ConfigError, ModelError
from paceline.model.cache import cache_folder, install
from paceline.model.loading import load_model, load_tokenizer, model_fingerprint

SHORT = {"max_steps": 3, "batch": 8, "hidden": 48, "ffn": 32}


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a recipe of three steps and an empty cache."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    full = tiny.Recipe
    monkeypatch.setattr(tiny, "Recipe", lambda task: replace(full(task), **SHORT))
    return tmp_path / "cache"


def test_builds_are_bit_identical_for_any_thread_count() -> None:
    recipe, tokenizer = replace(tiny.Recipe("sort:5"), max_steps=10), tiny.make_tokenizer()
    first = tiny.make_model(recipe, tokenizer).state_dict()
    threads = torch.get_num_threads()
    torch.manual_seed(99)
    torch.set_num_threads(threads + 1)
    try:
        second = tiny.make_model(recipe, tokenizer).state_dict()
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_build_preserves_random_state_of_caller() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    tiny.make_model(replace(tiny.Recipe("sort:5"), **SHORT), tiny.make_tokenizer())
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.slow
def test_warm_up_reaches_target_reward() -> None:
    steps: list[tuple[int, int]] = []
    recipe, tokenizer = tiny.Recipe(tiny.DEFAULT_TASK), tiny.make_tokenizer()
    model = tiny.make_model(recipe, tokenizer, lambda step, total: steps.append((step, total)))
    assert sum(p.numel() for p in model.parameters()) < 700_000
    assert steps == [(i + 1, recipe.max_steps) for i in range(len(steps))]
    task = tiny.get_task(tiny.DEFAULT_TASK)
    rows = [task.row(i, seed=0) for i in range(256)]
    prompts = tokenizer([row["prompt"] for row in rows], return_tensors="pt")
    torch.manual_seed(0)
    output = model.generate(**prompts, max_new_tokens=8, do_sample=True, top_k=0)
    tokens = output[:, prompts.input_ids.shape[1] :]
    completions = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    scores = [task.score(text, row) for text, row in zip(completions, rows, strict=True)]
    assert 0.15 < sum(scores) / len(scores) < 0.4  # about one completion in four is exact


def test_tiny_model_is_created_once_and_loads_like_any_model(quick: Path) -> None:
    folder = resolve_model("tiny:sort:5")
    stamp = (Path(folder) / "model.safetensors").stat()
    assert resolve_model("tiny", task="sort:5") == folder
    assert (Path(folder) / "model.safetensors").stat().st_mtime_ns == stamp.st_mtime_ns
    assert resolve_model("tiny", task="copy") != folder
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    assert not model.training
    assert tokenizer("sort é 12=").input_ids == tiny.make_tokenizer()("sort é 12=").input_ids
    assert max(tokenizer("<|endoftext|>").input_ids) < model.config.vocab_size
    assert [p.name for p in quick.iterdir() if p.name.startswith(".")] == []


def test_chat_template_keeps_tokens_of_single_message() -> None:
    tokenizer = tiny.make_tokenizer()
    plain = tokenizer("sort 31=").input_ids
    messages = [{"role": "user", "content": "sort 31="}]
    assert tokenizer.apply_chat_template(messages, return_dict=False) == plain
    assert tokenizer.decode(plain, skip_special_tokens=True) == "sort 31="


def _make(cache: str, done: "multiprocessing.Queue[str]") -> None:
    os.environ["PACELINE_CACHE"] = cache
    recipe = replace(tiny.Recipe("sort:5"), **SHORT)
    folder = cache_folder() / recipe.folder
    model = tiny.make_model(recipe, tiny.make_tokenizer())
    install(folder, lambda temporary: model.save_pretrained(temporary))
    done.put(model_fingerprint(str(folder)))


@pytest.mark.slow
def test_two_processes_may_create_model_concurrently(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    done = context.Queue()
    processes = [context.Process(target=_make, args=(str(tmp_path), done)) for _ in range(2)]
    for process in processes:
        process.start()
    assert done.get(timeout=240) == done.get(timeout=240)
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    assert len(list(tmp_path.iterdir())) == 1


def test_failed_build_leaves_no_files(quick: Path) -> None:
    def fail(step: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve_model("tiny", progress=fail)
    assert list(quick.iterdir()) == []


def test_unknown_task_is_rejected() -> None:
    with pytest.raises(ConfigError, match="did you mean 'sort'"):
        resolve_model("tiny:srot")


def test_load_model_names_what_is_missing(quick: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model = './nowhere': no such file or directory"):
        load_model("./nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="has no weights"):
        load_model(str(tmp_path / "empty"))
    (tmp_path / "empty" / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_model(str(tmp_path / "empty"))
    folder = Path(resolve_model("tiny"))
    (tmp_path / "empty" / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ModelError, match="cannot load the model in"):
        load_model(str(tmp_path / "empty"))
    with pytest.raises(ModelError, match="dtype 'float31'"):
        load_model(str(folder), dtype="float31")


def test_load_model_raises_when_weights_are_missing(quick: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = Path(resolve_model("tiny"))
    weights = load_file(folder / "model.safetensors")
    name = next(n for n in weights if "q_proj.weight" in n)
    del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError,
        match=r"1 weights are missing, for example 'model\.layers\.0\.self_attn\.q_proj\.weight'",
    ):
        load_model(str(folder))


def test_fingerprint_changes_with_weights(quick: Path) -> None:
    folder = Path(resolve_model("tiny"))
    before = model_fingerprint(str(folder))
    assert before == model_fingerprint(resolve_model("tiny"))
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert before != model_fingerprint(str(folder))


def test_tiny_model_is_cached_in_temporary_directory_when_home_is_not_writable(
    quick: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "home").write_text("a file, so that nothing can be created in it")
    (tmp_path / "tmp").mkdir()
    for name in ("PACELINE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    folder = resolve_model("tiny")
    assert Path(folder).parent.parent == tmp_path / "tmp"
    assert load_model(folder).config.model_type == "qwen2"
    assert "cannot be written (Not a directory)" in caplog.text
    assert "PACELINE_CACHE" in caplog.text
    caplog.clear()
    assert resolve_model("tiny") == folder and not caplog.text


def test_tiny_model_names_variable_when_no_directory_is_writable(
    quick: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot be written to .*; set PACELINE_CACHE"):
        resolve_model("tiny")


def test_cache_folder_follows_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/paceline")
    monkeypatch.setenv("PACELINE_CACHE", "/y")
    assert cache_folder() == Path("/y")
