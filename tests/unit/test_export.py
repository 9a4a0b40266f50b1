"""An export is a model directory with the values of the checkpoint in the wanted dtype."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
)
from typer.testing import CliRunner

from paceline.cli import app
from paceline.config import load_config
from paceline.data.tiny import make_tokenizer
from paceline.errors import CheckpointError, ConfigError
from paceline.model.loading import TokenizerFiles
from paceline.model.tensor_file import TensorFiles
from paceline.observe.model_card import model_card, write_model_card
from paceline.settings import with_settings
from paceline.training.checkpoint import save_checkpoint, verify_checkpoint
from paceline.training.export import export_model, find_checkpoint, parse_size
from paceline.training.lora import LoraDevice
from paceline.training.settings import LoraSettings, TrainSettings
from paceline.training.single import SingleDevice
from tests.architectures import ARCHITECTURES, tiny_architecture
from tests.unit.test_hub import randomize_buffers, saved_names

CONFIG = load_config(overrides=["model=tiny", "data.task=copy:3", "run_dir=runs/copy"])


def write_run(
    folder: Path,
    engine: SingleDevice,
    steps: tuple[int, ...] = (2,),
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Path:
    """Write a run directory with the checkpoints of an engine."""
    if tokenizer is None:
        tokenizer = make_tokenizer()
        tokenizer.chat_template = "{{ messages }}"
    files = TokenizerFiles(tokenizer)

    async def write(target: Path) -> None:
        engine.save(target)
        files.write(target / "actor")
        GenerationConfig(eos_token_id=[2, 9]).save_pretrained(target / "actor")
        write_model_card(target / "actor", model_card(CONFIG, 2, 0.75))

    for step in steps:
        folder.mkdir(exist_ok=True)
        asyncio.run(save_checkpoint(folder / "checkpoints", step, {"step": step}, write, 9))
    return folder


def moe() -> SingleDevice:
    model = tiny_architecture("deepseek_v3")
    randomize_buffers(model)
    return SingleDevice(model, TrainSettings())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"), moe(), steps=(2, 4))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_export_equals_save_pretrained_in_each_dtype(dtype: str, run: Path, tmp_path: Path) -> None:
    done = export_model(run, to=tmp_path / "out", dtype=dtype)
    assert (done.step, done.files) == (4, 1)
    plain, info = AutoModelForCausalLM.from_pretrained(done.folder, output_loading_info=True)
    assert not any(info.values()) and plain.dtype == getattr(torch, dtype)
    actor = run / "checkpoints" / "step_00000004" / "actor"
    original = AutoModelForCausalLM.from_pretrained(actor, dtype=getattr(torch, dtype))
    original.save_pretrained(tmp_path / "original")
    assert saved_names(done.folder) == saved_names(tmp_path / "original")
    for name, tensor in original.state_dict().items():
        assert torch.equal(plain.state_dict()[name], tensor)
    config = json.loads((done.folder / "config.json").read_text())
    assert config["dtype"] == dtype and config["architectures"] == ["DeepseekV3ForCausalLM"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_export_has_names_of_save_pretrained_for_each_architecture(
    name: str, tmp_path: Path
) -> None:
    model = tiny_architecture(name)
    randomize_buffers(model)
    run = write_run(tmp_path / "run", SingleDevice(model, TrainSettings()))
    done = export_model(run, to=tmp_path / "out", dtype="bfloat16")
    model.save_pretrained(tmp_path / "float32")
    # transformers keeps some tensors in float32.
    original = AutoModelForCausalLM.from_pretrained(tmp_path / "float32", dtype=torch.bfloat16)
    original.save_pretrained(tmp_path / "original")
    assert saved_names(done.folder) == saved_names(tmp_path / "original")
    opened, info = AutoModelForCausalLM.from_pretrained(done.folder, output_loading_info=True)
    assert not any(info.values()) and opened.dtype == torch.bfloat16
    for key, tensor in original.state_dict().items():
        assert torch.equal(opened.state_dict()[key], tensor)


def test_export_contains_tokenizer_generation_config_and_card(run: Path, tmp_path: Path) -> None:
    folder = export_model(run, to=tmp_path / "out").folder
    assert AutoTokenizer.from_pretrained(folder).chat_template == "{{ messages }}"
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [2, 9]
    assert (folder / "README.md").read_text().startswith("---\nlibrary_name: transformers\n")
    assert not list(folder.glob("*optimizer*"))


def test_export_contains_named_chat_templates(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    run = write_run(tmp_path / "run", moe(), steps=(2, 4), tokenizer=tokenizer)
    folder = export_model(run, 4, to=tmp_path / "out").folder
    assert AutoTokenizer.from_pretrained(folder).chat_template == tokenizer.chat_template


def test_export_splits_weights_into_shards(run: Path, tmp_path: Path) -> None:
    done = export_model(run, to=tmp_path / "out", max_shard_size="20KB")
    assert done.files > 2 and (done.folder / "model.safetensors.index.json").exists()
    _, info = AutoModelForCausalLM.from_pretrained(done.folder, output_loading_info=True)
    assert not any(info.values())


@pytest.mark.parametrize(
    ("source", "step"),
    [("", 4), ("checkpoints/step_00000002", 2), ("checkpoints/step_00000002/actor", 2)],
)
def test_checkpoint_is_found_from_run_checkpoint_or_model(
    source: str, step: int, run: Path
) -> None:
    assert find_checkpoint(run / source).name == f"step_0000000{step}"


def test_export_of_step_goes_to_run_directory(run: Path) -> None:
    result = CliRunner().invoke(app, ["export", str(run), "--step", "2", "--dtype", "bfloat16"])
    assert result.exit_code == 0, result.output
    assert "exported step 2" in result.output
    assert TensorFiles.of_model(run / "export" / "step_00000002").layout()[0][2] == torch.bfloat16


@pytest.mark.parametrize("place", ["checkpoints/step_00000004", "checkpoints/step_00000004/actor"])
def test_export_from_within_checkpoint_goes_to_run_directory(
    place: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    monkeypatch.chdir(copy / place)
    assert export_model(Path("."), force=True).folder == copy / "export" / "step_00000004"
    verify_checkpoint(copy / "checkpoints" / "step_00000004")


def test_export_into_its_checkpoint_is_rejected(run: Path) -> None:
    checkpoint = run / "checkpoints" / "step_00000004"
    with pytest.raises(CheckpointError, match=r"inside of the checkpoint .*--to"):
        export_model(run, to=checkpoint / "export")
    verify_checkpoint(checkpoint)


def test_export_fails_without_checkpoint(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["export", str(tmp_path)])
    assert result.exit_code == CheckpointError.exit_code
    assert "has no checkpoint; expected a run directory" in result.output


def test_export_names_saved_steps_but_not_other_directories_when_step_is_unknown(
    run: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "checkpoints/step_00000004.backup").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint of step 3; it has those of 2, 4"):
        export_model(copy, 3)


def test_export_rejects_damaged_checkpoint(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "checkpoints/step_00000004/actor/config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"actor/config\.json is damaged"):
        export_model(copy, 4)


def test_export_command_warns_when_last_checkpoint_is_damaged(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "checkpoints" / "step_00000004" / "state.json").write_text("{}")
    result = CliRunner().invoke(app, ["export", str(copy), "--to", str(tmp_path / "out")])
    assert "exported step 2" in result.stdout, result.output
    assert "warning: checkpoint" in result.stdout and "state.json is damaged" in result.stdout


def test_export_says_that_active_run_deleted_its_checkpoint(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run, copy := tmp_path / "run")

    def delete(actor: Path, *_: object) -> None:
        shutil.rmtree(actor.parent)
        raise CheckpointError(f"cannot read {actor}/model.safetensors: No such file or directory")

    monkeypatch.setattr("paceline.training.export._write_model", delete)
    with pytest.raises(CheckpointError, match="step_00000004 was deleted during the export: an ac"):
        export_model(copy, to=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_export_keeps_directory_with_other_files(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is not an earlier export"):
        export_model(run, to=tmp_path, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_export_replaces_earlier_export_only_with_force(run: Path, tmp_path: Path) -> None:
    to = tmp_path / "out"
    export_model(run, to=to, max_shard_size="20KB")
    with pytest.raises(CheckpointError, match="replace it with --force"):
        export_model(run, to=to)
    export_model(run, to=to, force=True)
    assert [path.name for path in to.glob("model*")] == ["model.safetensors"]


def test_adapter_is_exported_alone_for_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = tiny_architecture("qwen3_moe")
    base.save_pretrained(tmp_path / "base")
    engine = LoraDevice(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"),
        TrainSettings(lora=LoraSettings(rank=2, targets=("q_proj", "v_proj"))),
    )
    for parameter in engine._parameters.values():
        parameter.data.normal_()
    source = write_run(tmp_path / "run", engine)
    merged = AutoModelForCausalLM.from_pretrained(export_model(source).folder)
    adapter = export_model(source, adapter=True).folder
    assert adapter.name == "step_00000002-adapter"
    assert "library_name: peft" in (adapter / "README.md").read_text()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = peft.PeftModel.from_pretrained(base, adapter).merge_and_unload()
    for name, tensor in merged.state_dict().items():
        torch.testing.assert_close(adapted.state_dict()[name], tensor)


def test_adapter_export_fails_when_run_has_none(run: Path) -> None:
    with pytest.raises(CheckpointError, match="the run did not set"):
        export_model(run, adapter=True)


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("500 MB", 5 * 10**8), ("1.5kb", 1500)]
)
def test_size_has_decimal_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "5", "GB", "0GB", "-1GB", "5 parsecs"])
def test_size_without_number_or_unit_fails(text: str, run: Path) -> None:
    with pytest.raises(ConfigError, match="for example 5GB"):
        export_model(run, max_shard_size=text)


def test_unknown_dtype_fails(run: Path) -> None:
    with pytest.raises(ConfigError, match="expected one of float32, bfloat16, float16"):
        export_model(run, dtype="int8")


def test_model_card_has_metadata_of_hub() -> None:
    config = load_config(
        overrides=[
            "model=Qwen/Qwen2.5-0.5B-Instruct",
            "data.path=/data/rows.jsonl",
            "reward.function=exact",
            "algorithm.name=reinforce++",
            "run_dir=runs/first",
        ]
    )
    evaluation = {"step": 180, "reward": 0.625}
    _, front, text = model_card(config, 200, 0.5, evaluation).split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "transformers",
        "license": "unknown",
        "base_model": "Qwen/Qwen2.5-0.5B-Instruct",
        "tags": ["reinforcement-learning", "reinforce++", "paceline"],
    }
    assert text.startswith("\n# first\n")
    tested = "Evaluation | mean reward 0.625 on held-out prompts at step 180"
    for fact in ("Train steps | 200", "last step | 0.5", "Data | rows.jsonl", tested):
        assert f"{fact} |" in text


def test_model_card_has_settings_without_directories() -> None:
    chosen = ["data.path=/home/me/rows.jsonl", "reward.function=exact", "train.learning_rate=0.5"]
    text = model_card(load_config(overrides=[*chosen, "run_dir=/home/me/runs"]), 1, None)
    recipe = text.partition("## Recipe")[2].splitlines()
    assert {"data.path=rows.jsonl", "train.learning_rate=0.5"} <= set(recipe)
    assert "/home/me" not in text


def test_model_card_lists_given_settings_without_automatic_ones() -> None:
    given = load_config("hybrid", ["steps=7", "train.micro_batch_tokens=auto"])
    chosen = with_settings(given, {"train.micro_batch_tokens": 2048, "rollout.slots": 3})
    recipe = model_card(chosen, 7, None, given=given).partition("## Recipe")[2]
    assert "steps=7" in recipe
    assert not [name for name in ("auto", "micro_batch_tokens", "slots") if name in recipe]


def test_model_card_of_local_base_has_no_public_name() -> None:
    assert "base_model" not in model_card(CONFIG, 1, None)
