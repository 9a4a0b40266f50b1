"""Complete supervised runs: results, backends, resuming, and the model they leave."""

import asyncio
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from click.testing import Result
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import paceline
from paceline.cli import app
from paceline.errors import CheckpointError, ConfigError, DataError, WorkerDied
from paceline.supervised.config import load_sft_config
from paceline.supervised.run import fine_tune
from tests.audits import assert_consistent
from tests.fault_report import Fault
from tests.processes import children
from tests.small_runs import steps_of, weights

SMALL = [
    "rows_per_step=8",
    "data.task=copy:3",
    "data.limit=56",
    "data.max_length=32",
    "placement.threads=1",
    "train.learning_rate=1e-3",
    "train.lr_schedule=cosine",
    "validation.rows=8",
    "validation.every=2",
]
FSDP = {
    "data parallel": ["train.backend=fsdp", "placement.train_ranks=2"],
    "tensor parallel": ["train.backend=fsdp", "train.tensor_parallel=2"],
}


def run(model: str, folder: Path, *settings: str) -> dict[str, Any]:
    overrides = [f"model={model}", f"run_dir={folder}", *SMALL, *settings]
    return asyncio.run(fine_tune(load_sft_config(None, overrides)))


def losses(folder: Path) -> list[float]:
    return [row["train/loss"] for row in steps_of(folder)]


def actor(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step_{step:08d}" / "actor"


@pytest.fixture(scope="module")
def single(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train one epoch, six steps, on one device."""
    folder = tmp_path_factory.mktemp("single")
    run(model, folder)
    return folder


def test_run_reports_falling_loss_and_validation_loss(single: Path) -> None:
    summary = json.loads((single / "summary.json").read_text())
    found = steps_of(single)
    assert summary["steps"] == len(found) == 6
    assert summary["loss_last"] < summary["loss_first"] - 0.2
    assert summary["validation_loss"] < summary["validation_loss_first"] - 0.2
    measured = [row["step"] for row in found if "validation/loss" in row]
    assert measured == [2, 4, 6]
    assert found[-1]["validation/loss"] == pytest.approx(summary["validation_loss"], rel=1e-5)
    assert found[-1]["validation/perplexity"] == pytest.approx(
        summary["validation_perplexity"], rel=1e-5
    )
    assert all(row["data/rows"] == 8 for row in found)


def test_epochs_contain_every_row_once(model: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}", "completion": "x" * (n % 3 + 1)} for n in range(10)]
    config = load_sft_config(
        None, [f"model={model}", f"run_dir={tmp_path}", "rows_per_step=4", "epochs=2"]
    )
    asyncio.run(fine_tune(config, rows=rows))
    found = steps_of(tmp_path)
    assert [row["data/rows"] for row in found] == [4, 4, 4, 4, 4]
    assert sum(row["train/tokens"] for row in found) == 2 * sum(n % 3 + 2 for n in range(10))


@pytest.mark.parametrize(
    "name", ["data parallel", pytest.param("tensor parallel", marks=pytest.mark.slow)]
)
def test_two_fsdp_ranks_train_like_one_device(
    name: str, model: str, single: Path, tmp_path: Path
) -> None:
    summary = run(model, tmp_path, *FSDP[name])
    assert losses(tmp_path) == pytest.approx(losses(single), abs=1e-5)
    one = AutoModelForCausalLM.from_pretrained(actor(single, 6)).state_dict()
    two = AutoModelForCausalLM.from_pretrained(actor(tmp_path, 6)).state_dict()
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-5
    expected = json.loads((single / "summary.json").read_text())["validation_loss"]
    assert summary["validation_loss"] == pytest.approx(expected, abs=1e-5)


def test_resumed_run_equals_uninterrupted_run_bit_for_bit(
    model: str, single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.training.actor import Actor

    fit = Actor.fit

    def die(self: Actor, batch: Any, step: int) -> dict[str, float]:
        if step == 4:
            raise WorkerDied("the test ends the run")
        return fit(self, batch, step)

    monkeypatch.setattr(Actor, "fit", die)
    with pytest.raises(WorkerDied):
        run(model, tmp_path, "save_every=3")
    assert len(losses(tmp_path)) == 4, "one step after the checkpoint"
    monkeypatch.undo()
    assert_consistent(tmp_path)
    summary = run(model, tmp_path, "save_every=3")
    assert summary["steps"] == 6 and summary["steps_this_run"] == 3
    assert losses(tmp_path) == losses(single)
    assert weights(tmp_path, 6) == weights(single, 6)
    first = json.loads((single / "summary.json").read_text())["validation_loss_first"]
    assert summary["validation_loss_first"] == first
    assert_consistent(tmp_path)


@pytest.mark.slow
@pytest.mark.fault("A9", "supervised fine-tuning killed")
def test_killed_process_resumes_bit_for_bit(model: str, tmp_path: Path, fault: Fault) -> None:
    steps = ["steps=40", "save_every=10"]
    run(model, tmp_path / "whole", *steps)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'model = "{model}"\nrun_dir = "{tmp_path}/killed"\n')
    command = [sys.executable, "-m", "paceline", "sft", str(recipe), *SMALL, *steps]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    next(line for line in process.stdout if line.startswith("step   20  loss"))
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "the run ended before it was killed"
    fault.fired()
    run(model, tmp_path / "killed", *steps)
    fault.recovered()
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert weights(tmp_path / "killed", 40) == weights(tmp_path / "whole", 40)


KEPT = ["save_every=2", "keep_checkpoints=9"]


def test_run_starts_from_earlier_step_or_checkpoint_of_other_run(
    model: str, single: Path, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    run(model, first, *KEPT)
    settings = dict(setting.split("=") for setting in [*SMALL, *KEPT])
    middle = first / "checkpoints" / "step_00000004"
    branch = paceline.sft(
        model=model, run_dir=str(second), resume_from=middle, display=False, **settings
    )
    again = paceline.sft(model=model, run_dir=str(first), resume_from=2, display=False, **settings)
    assert (branch.summary["steps_this_run"], again.summary["steps_this_run"]) == (2, 4)
    for folder in (first, second):
        assert losses(folder) == losses(single)
        assert weights(folder, 6) == weights(single, 6), "with the optimizer's state"
        assert_consistent(folder)
    (aside,) = (first / "checkpoints").glob("abandoned.*")
    assert sorted(path.name for path in aside.iterdir()) == ["step_00000004", "step_00000006"]


def test_checkpoint_of_other_kind_of_training_is_rejected(single: Path, tmp_path: Path) -> None:
    checkpoint = single / "checkpoints" / "step_00000006"
    with pytest.raises(CheckpointError, match=r"the kind of training .* differ from this one's"):
        paceline.train(
            model=actor(single, 6),
            data="copy:3",
            run_dir=str(tmp_path / "run"),
            resume_from=checkpoint,
            display=False,
        )


def test_new_run_rejects_earlier_step(model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--fresh contradicts --from 2"):
        paceline.sft(model=model, data="copy:3", run_dir=str(tmp_path), fresh=True, resume_from=2)


@pytest.mark.slow
def test_supervisor_restarts_killed_run(model: str, tmp_path: Path) -> None:
    steps = ["steps=40", "save_every=10"]
    run(model, tmp_path / "whole", *steps)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'model = "{model}"\nrun_dir = "{tmp_path}/killed"\n')
    command = [sys.executable, "-m", "paceline", "sft", str(recipe), *SMALL, *steps]
    process = subprocess.Popen([*command, "--restart", "2"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    next(line for line in process.stdout if line.startswith("step   20  loss"))
    psutil.Process(process.pid).children()[0].kill()
    process.communicate()
    assert process.returncode == 0
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert weights(tmp_path / "killed", 40) == weights(tmp_path / "whole", 40)


def test_completed_run_returns_its_summary(model: str, single: Path) -> None:
    assert run(model, single) == json.loads((single / "summary.json").read_text())


def test_resume_with_other_data_is_rejected(model: str, single: Path) -> None:
    with pytest.raises(CheckpointError, match=r"data\.task: was 'copy:3', is now 'sort:3'"):
        run(model, single, "data.task=sort:3")


def test_result_loads_with_transformers(single: Path) -> None:
    folder = actor(single, 6)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    policy = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer("copy 123=", return_tensors="pt")["input_ids"]
    assert torch.isfinite(policy(input_ids=ids).logits).all()
    assert "supervised fine-tuning" in (folder / "README.md").read_text()


def test_result_is_model_of_training_run(single: Path, tmp_path: Path) -> None:
    result = paceline.train(
        model=actor(single, 6),
        data="copy:3",
        steps=1,
        run_dir=str(tmp_path),
        groups_per_step=2,
        group_size=2,
        display=False,
        **{"rollout.max_response_length": 4, "placement.threads": 1},
    )
    assert result.summary["steps"] == 1


def test_python_function_takes_rows_and_held_out_rows(model: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"copy {n}=", "completion": f"{n}"} for n in range(12)]
    result = paceline.sft(
        model=model,
        data=rows,
        validation=rows[:4],
        steps=2,
        rows_per_step=4,
        run_dir=str(tmp_path),
        display=False,
    )
    assert result.summary["steps"] == 2 and result.summary["validation_loss"] > 0
    assert result.checkpoint.is_dir() and len(result.metrics) == 2


def test_held_out_file_replaces_rows_of_recipe() -> None:
    held_out = load_sft_config("sft", ["validation.path=held_out.jsonl"]).validation
    assert held_out.path == "held_out.jsonl" and held_out.rows == 0


def test_dataset_with_conversations_is_trained(model: str, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    data = datasets.Dataset.from_list([{"messages": talk}] * 4)
    result = paceline.sft(
        model=model, data=data, rows_per_step=2, run_dir=str(tmp_path), display=False
    )
    assert result.summary["steps"] == 2
    assert [row["train/tokens"] for row in result.metrics] == [4, 4], "b and its end, twice"


def test_stream_needs_number_of_steps(model: str, tmp_path: Path) -> None:
    def rows() -> Any:
        return ({"prompt": f"{n}", "completion": "x"} for n in range(100))

    settings: dict[str, Any] = {"model": model, "run_dir": str(tmp_path), "display": False}
    with pytest.raises(ConfigError, match="set steps"):
        paceline.sft(data=rows(), **settings)
    result = paceline.sft(data=rows(), steps=2, rows_per_step=4, **settings)
    assert result.summary["steps"] == 2


def test_adapters_are_trained_and_merged(model: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    summary = run(model, tmp_path, "steps=2", "train.lora.rank=4")
    assert summary["steps"] == 2
    AutoModelForCausalLM.from_pretrained(actor(tmp_path, 2))


# -- command line


def sft(*args: object) -> Result:
    return CliRunner().invoke(app, ["sft", *(str(arg) for arg in args)])


@pytest.fixture
def recipe(model: str, tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(
        f'model = "{model}"\nrun_dir = "{tmp_path}/run"\nsteps = 2\nrows_per_step = 4\n'
        f'[data]\npath = "{tmp_path}/rows.jsonl"\nmax_length = 20\n[placement]\nthreads = 1\n'
    )
    rows = [{"prompt": f"{n}", "completion": f"{n}"} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_command_prints_losses_and_model(recipe: Path, tmp_path: Path) -> None:
    result = sft(recipe)
    assert result.exit_code == 0, result.output
    output = "".join(result.output.split())
    assert "step2loss" in output and "loss,first→last" in output and "step_00000002" in output
    again = sft(recipe)
    assert again.exit_code == 0 and "is complete: 2 of 2 steps" in " ".join(again.output.split())


def test_command_reports_bad_rows_with_their_lines(recipe: Path, tmp_path: Path) -> None:
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"prompt": "x"}\n{"prompt": "x", "completion": "much too long for this"}\n')
    result = sft(recipe)
    assert result.exit_code == DataError.exit_code, result.output
    assert "rows.jsonl:9: expected 'prompt' and 'completion'" in result.output
    assert "rows.jsonl:10: the row has 25 tokens; data.max_length = 20" in result.output
    assert not (tmp_path / "run").exists() and not children()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("group_size=4", "unknown setting 'group_size'; `paceline settings --sft` lists"),
        ("batch_size=4", "did you mean 'rows_per_step'?"),
        ("data.path=none.jsonl", "no data file at 'none.jsonl'"),
        ("data.completion_key=answer", "no columns 'prompt' and 'answer'"),
        ("placement.train_ranks=2", "contradicts train.backend = 'single'"),
        ("validation.path=none.jsonl", "no data file at 'none.jsonl'"),
        ("train.staleness_kl_target=0.1", "train.staleness_kl_target = 0.1"),
    ],
)
def test_command_explains_wrong_setting(recipe: Path, setting: str, message: str) -> None:
    result = sft(recipe, setting)
    assert result.exit_code in (2, 3), result.output
    assert message in " ".join(result.output.split()) and "Traceback" not in result.output


def test_train_names_command_of_supervised_recipe() -> None:
    result = CliRunner().invoke(app, ["train", "sft"])
    assert result.exit_code == 2 and "paceline sft sft" in " ".join(result.output.split())


@pytest.mark.fault("A13", "Ctrl-C to supervised fine-tuning")
def test_ctrl_c_saves_step_and_stops_run_with_exit_code_130(recipe: Path, fault: Fault) -> None:
    command = [sys.executable, "-m", "paceline", "sft", str(recipe), "steps=100000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step "):
            process.send_signal(signal.SIGINT)
            break
    output = process.stdout.read()
    assert process.wait(60) == 130
    fault.fired()
    assert re.search(r"stopped; the same command continues from step \d+", output), output
