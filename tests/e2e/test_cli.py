"""Command line: each user error is one clear message with the right exit code."""

import json
import logging
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from click.testing import Result
from typer.testing import CliRunner

from paceline.cli import app
from paceline.cli.app import log_to_console
from paceline.config import describe_settings, load_config
from paceline.run_dir import lock_run_dir
from paceline.training.checkpoint import verify_checkpoint
from tests.fault_report import Fault
from tests.processes import children

ROOT = Path(__file__).parents[2]
REWARDS = ROOT / "tests" / "rewards.py"


@pytest.fixture
def recipe(model: str, tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(
        f'model = "{model}"\nrun_dir = "{tmp_path}/run"\n'
        "steps = 2\ngroups_per_step = 2\ngroup_size = 2\n"
        '[data]\ntask = "copy:3"\nlimit = 256\nmax_prompt_length = 32\n'
        "[rollout]\nmax_response_length = 4\n[placement]\nthreads = 1\n"
    )
    return path


def paceline(*args: object) -> Result:
    return CliRunner().invoke(app, ["train", *(str(arg) for arg in args)])


def assert_error(result: Result, code: int, *messages: str) -> None:
    output = " ".join(result.output.split())
    assert result.exit_code == code, result.output
    for message in messages:
        assert message in output, f"{message!r} is not in: {output}"
    assert "Traceback" not in output
    assert not children(), "a child process is still running"


def test_train_writes_summary_metrics_ledger_samples_and_checkpoint(
    recipe: Path, tmp_path: Path
) -> None:
    result = paceline(recipe)
    assert result.exit_code == 0, result.output
    assert "Run summary" in result.output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    expected = {
        "steps",
        "reward_first",
        "reward_last",
        "samples_per_s",
        "tokens_per_s",
        "steps_per_s",
        "mean_sample_age_s",
        "staleness_mean",
        "staleness_max",
        "sync_latency_s",
        "queue_utilization",
        "rollout_busy_fraction",
        "train_busy_fraction",
        "memory_peak_bytes",
        "ledger",
    }
    assert expected <= summary.keys()
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(metrics) == summary["steps"] == 2
    assert (tmp_path / "run" / "ledger.jsonl").exists()
    assert (tmp_path / "run" / "checkpoints" / "step_00000002").is_dir()
    shown = CliRunner().invoke(app, ["samples", str(tmp_path / "run"), "--step", "1"])
    assert shown.exit_code == 0, shown.output
    assert "step 1: copy:3" in shown.output
    assert shown.output.count("reward ") == 2


def test_train_shows_devices_at_start(recipe: Path, tmp_path: Path) -> None:
    result = paceline(recipe, "steps=1")
    line = next(line for line in result.output.splitlines() if " on " in line)
    assert re.fullmatch(r"actor and rollout on (CPU|GPU) .*; float32, native engine", line)
    assert line in (tmp_path / "run" / "logs" / "main.log").read_text()


@pytest.mark.slow
def test_train_continues_when_reader_of_output_is_gone(recipe: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paceline", "train", str(recipe)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == 0 and not errors, errors
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2
    assert "its reader has exited" in (tmp_path / "run" / "logs" / "main.log").read_text()


def test_train_reports_finished_run_when_all_steps_are_done(recipe: Path) -> None:
    assert paceline(recipe).exit_code == 0
    again = paceline(recipe)
    assert again.exit_code == 0 and "2 of 2 steps" in again.output, again.output


def test_fresh_moves_old_run_aside(recipe: Path, tmp_path: Path) -> None:
    assert paceline(recipe, "steps=1").exit_code == 0
    assert "moved the earlier run" in paceline(recipe, "steps=1", "--fresh").output
    assert len(list(tmp_path.glob("run*/summary.json"))) == 2


def test_fresh_keeps_old_run_when_new_run_cannot_start(recipe: Path, tmp_path: Path) -> None:
    assert paceline(recipe, "steps=1").exit_code == 0
    with lock_run_dir(Path(load_config(recipe).run_dir)):
        assert_error(paceline(recipe, "--fresh"), 10, "in use by another run")
    no_data = ["data.path=nowhere.jsonl", "reward.function=exact"]
    assert_error(paceline(recipe, "--fresh", *no_data), 3, "nowhere.jsonl")
    no_reward = "reward.function=nowhere.py:score"
    assert_error(paceline(recipe, "--fresh", no_reward), 2, "nowhere.py")
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.fault("C3", "the only checkpoint is damaged")
def test_train_fails_when_every_checkpoint_is_damaged(
    recipe: Path, tmp_path: Path, fault: Fault
) -> None:
    assert paceline(recipe).exit_code == 0
    (tmp_path / "run" / "checkpoints" / "step_00000002" / "state.json").write_text("{")
    fault.fired()
    assert_error(
        paceline(recipe, "steps=3"), 10, "state.json is damaged", "no checkpoint", "--fresh"
    )


@pytest.mark.parametrize(
    ("setting", "messages"),
    [
        (
            "schedule.max_stalenes=3",
            ["unknown setting 'schedule.max_stalenes'", "did you mean 'schedule.max_staleness'"],
        ),
        ("stepps=3", ["unknown setting 'stepps'", "did you mean 'steps'"]),
        ("steps=many", ["steps = 'many'", "integer"]),
        ("steps=0", ["steps = 0", "greater than or equal to 1"]),
        ("schedule.on_sync=wait", ["schedule.on_sync = 'wait'", "drain"]),
        ("schedule.sync_every=4", ["schedule.sync_every = 4", "schedule.max_staleness = 0"]),
        ("queue.max_queue_size=1", ["queue.max_queue_size = 1", "groups_per_step = 2"]),
        ("group_size=1", ["group_size = 1", "algorithm.name = 'grpo'"]),
        ("rollout.top_p=0.9", ["rollout.top_p = 0.9"]),
        ("run_dir=", ["run_dir = ''"]),
        (
            "placement.critic=other",
            [
                "placement.critic = 'other' would stay empty",
                "algorithm.name = 'ppo'",
                "placement.critic=main",
            ],
        ),
        ("placement.reward=other", ["placement.reward = 'other'", "set reward.model"]),
        ("data=3", ["data = 3: data is a section", "data.task=..."]),
        ("rollout.stop=a", ["rollout.stop = 'a': expected a list"]),
        ('rollout.stop=[""]', ["rollout.stop.0 = ''", "at least 1 character"]),
        ("algorithm.kl_target=0.1", ["algorithm: kl_target = 0.1 contradicts kl_coef = 0.0"]),
        ("data.task=sorrt:5", ["did you mean 'sort'"]),
        ("nonsense", ["key=value"]),
        ("model.size=3", ["'model' is a single setting"]),
        ("reward.function=nowhere:score", ["nowhere"]),
        ("reward.function=exactly", ["exact"]),
    ],
)
def test_train_names_setting_when_it_is_invalid(
    setting: str, messages: list[str], recipe: Path, tmp_path: Path
) -> None:
    assert_error(paceline(recipe, setting), 2, *messages)
    assert not (tmp_path / "run").exists()


def test_settings_are_listed_as_written_on_command_line() -> None:
    listed = describe_settings()
    written = [
        f"{name}={default}"
        for name, default, _ in listed
        if default != "unset" and "lora" not in name and "judge" not in name  # off by default
    ]
    assert load_config(None, written) == load_config(None) and len(listed) > 60
    shown = CliRunner().invoke(app, ["settings", "data.on"]).output
    assert "data.on_bad_row" in shown and "One of fail, skip." in shown and "rollout" not in shown


def test_settings_suggests_name_when_none_matches() -> None:
    result = CliRunner().invoke(app, ["settings", "max_stalness"])
    assert_error(result, 2, "did you mean 'schedule.max_staleness'?")


def test_alias_setting_overrides_recipe(recipe: Path) -> None:
    result = paceline(
        recipe,
        "schedule.staleness_threshold=3",
        "total_training_steps=7",
        "train_batch_size=3",
        "--dry-run",
    )
    shown = json.loads(result.output)
    assert shown["schedule"]["max_staleness"] == 3
    assert (shown["steps"], shown["groups_per_step"]) == (7, 3)


def test_command_line_replaces_alternative_setting_of_recipe(recipe: Path) -> None:
    recipe.write_text(recipe.read_text() + '[reward]\nfunction = "exact"\n')
    result = paceline(recipe, "data.path=custom.jsonl", "reward.model=scorer", "--dry-run")
    shown = json.loads(result.output)
    assert (shown["data"]["task"], shown["data"]["path"]) == (None, "custom.jsonl")
    assert (shown["reward"]["function"], shown["reward"]["model"]) == (None, "scorer")


def test_train_fails_when_command_line_sets_both_alternatives(recipe: Path) -> None:
    assert_error(
        paceline(recipe, "data.path=custom.jsonl", "data.task=sort:5"),
        2,
        "data: task = 'sort:5' and path = 'custom.jsonl' are both set",
    )


def test_python_m_paceline_runs_command_line() -> None:
    command = [sys.executable, "-m", "paceline", "--help"]
    output = subprocess.run(command, capture_output=True, text=True).stdout
    assert "Usage: paceline" in output


def test_command_ends_without_traceback_when_interrupted_during_its_imports() -> None:
    program = (
        "import os, runpy, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "runpy.run_module('paceline', run_name='__main__')\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (-signal.SIGINT, "")


@pytest.mark.usefixtures("recipe")
def test_train_suggests_recipe_when_path_is_misspelled(tmp_path: Path) -> None:
    result = paceline(tmp_path / "recipee.toml")
    assert_error(result, 2, "does not exist", "did you mean", "recipe.toml")


def test_train_names_line_when_recipe_is_not_toml(recipe: Path) -> None:
    recipe.write_text("steps = = 3")
    assert_error(paceline(recipe), 2, "not valid TOML", "line 1")


@pytest.mark.parametrize(
    ("content", "messages"),
    [
        ("", ["empty"]),
        ('{"prompt": "a"}\n{"promt": "b"}\n', ["2", "prompt"]),
        ('{"prompt": "a"}\nnot json\n', ["2", "JSON"]),
        ('{"prompt": "a"}\n{"prompt": ""}\n', ["2", "empty"]),
        ('{"prompt": "a"}\n{"prompt": 5}\n', ["2"]),
        ('{"prompt": "' + "a" * 60 + '"}\n', ["1", "max_prompt_length = 32"]),
    ],
)
def test_train_names_row_when_data_is_invalid(
    content: str, messages: list[str], recipe: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(content)
    recipe.write_text(recipe.read_text().replace('task = "copy:3"', f'path = "{data}"'))
    assert_error(paceline(recipe, "reward.function=exact"), 3, "data.jsonl", *messages)
    assert not (tmp_path / "run").exists()


def test_train_names_path_when_model_or_data_is_missing(recipe: Path) -> None:
    assert_error(paceline(recipe, "model=./nowhere"), 4, "nowhere")
    recipe.write_text(recipe.read_text().replace('task = "copy:3"', 'path = "gone.jsonl"'))
    assert_error(paceline(recipe, "reward.function=exact"), 3, "gone.jsonl")


@pytest.mark.parametrize(
    ("function", "timeout_s", "messages"),
    [
        ("raises", 60, ["raises", "KeyError", "no such column"]),
        ("nothing", 60, ["nothing", "None"]),
        ("nan", 60, ["nan"]),
        ("hangs", 0.5, ["hangs", "0.5 s"]),
    ],
)
def test_train_makes_no_step_when_reward_function_fails(
    function: str, timeout_s: float, messages: list[str], recipe: Path, tmp_path: Path
) -> None:
    reward = f"reward.function={REWARDS}:{function}"
    result = paceline(recipe, reward, f"reward.timeout_s={timeout_s}")
    assert_error(result, 5, *messages, "rollout.max_failed_groups = 0")
    assert not (tmp_path / "run" / "checkpoints").exists()
    events = [
        json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()
    ]
    assert {event["event"] for event in events} == {"issued", "dropped"}


def test_reward_function_output_is_written_to_main_log(recipe: Path, tmp_path: Path) -> None:
    assert paceline(recipe, f"reward.function={REWARDS}:prints").exit_code == 0
    assert "reward output: scoring" in (tmp_path / "run" / "logs" / "main.log").read_text()


def test_reward_components_are_written_to_metrics_and_samples(recipe: Path, tmp_path: Path) -> None:
    assert paceline(recipe, f"reward.function={REWARDS}:in_parts", "steps=1").exit_code == 0
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    samples = json.loads((tmp_path / "run" / "samples.jsonl").read_text().splitlines()[0])
    assert row["reward_component/length"] > 0
    for completion in samples["completions"]:
        assert completion["details"] == {"length": len(completion["text"])}


def test_train_rejects_row_without_reference_answer(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b"}\n')
    assert_error(
        paceline(recipe, f"data.path={tmp_path}/data.jsonl", "reward.function=exact"),
        3,
        "data.jsonl:2",
        "no 'answer'",
    )
    assert not (tmp_path / "run").exists()


def test_failed_groups_are_dropped_when_limit_allows(recipe: Path, tmp_path: Path) -> None:
    result = paceline(
        recipe,
        f"reward.function={REWARDS}:sometimes_raises",
        "rollout.max_failed_groups=1000",
        "steps=6",
    )
    assert result.exit_code == 0, result.output
    events = [
        json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()
    ]
    dropped = {event["seq"] for event in events if event["event"] == "dropped"}
    trained = [event["seq"] for event in events if event["event"] == "trained"]
    assert dropped and len(trained) == len(set(trained)) == 12 and not dropped & set(trained)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["ledger"]["dropped"] == {
        "reward_failed": len(dropped)
    }


def test_train_warns_when_every_advantage_is_zero(recipe: Path) -> None:
    result = paceline(recipe, f"reward.function={REWARDS}:always_one")
    output = " ".join(result.output.split())
    assert result.exit_code == 0, output
    assert "every token has advantage 0" in output
    assert "the step changed no weight" not in output


def test_cli_import_does_not_load_torch() -> None:
    load = "import sys, paceline.cli, paceline.config; "
    check = "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", load + check]).returncode == 0


def test_console_shows_warnings_without_tracebacks(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_console()
    try:
        logging.getLogger("paceline.test").warning("a warning")
        try:
            raise ValueError("internal detail")
        except ValueError:
            logging.getLogger("paceline.test").exception("it failed")
    finally:
        logging.getLogger("paceline").handlers.clear()
    output = capsys.readouterr().out
    assert "a warning" in output and "internal detail" not in output


def test_recipes_have_valid_settings() -> None:
    for path in sorted((ROOT / "recipes").glob("*.toml")):
        command = "sft" if path.stem == "sft" else "train"
        result = CliRunner().invoke(app, [command, str(path), "--dry-run"])
        assert result.exit_code == 0, f"{path}: {result.output}"


@pytest.mark.parametrize(
    ("number", "code", "ignoring", "separate"),
    [
        (signal.SIGINT, 130, False, ["placement.actor=train", "placement.rollout=rollout"]),
        pytest.param(signal.SIGINT, 130, True, [], marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 143, False, [], marks=pytest.mark.slow),
        (signal.SIGHUP, 129, False, ["placement.actor=train", "placement.rollout=rollout"]),
    ],
    ids=["Ctrl-C", "Ctrl-C to a background job", "SIGTERM", "SIGHUP"],
)
@pytest.mark.fault("A13", "signal {number.name} to a run (ignoring SIGINT at start: {ignoring})")
def test_signal_finishes_and_saves_step_and_prints_how_to_resume(
    number: int,
    code: int,
    ignoring: bool,
    separate: list[str],
    recipe: Path,
    tmp_path: Path,
    fault: Fault,
) -> None:
    """Ignore SIGINT at start if `ignoring`, as shells do for background jobs."""
    command = [sys.executable, "-m", "paceline", "train", str(recipe)]
    command += ["steps=100000", "save_every=0", *separate]
    if ignoring:
        command = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *command]
    metrics = tmp_path / "run" / "metrics.jsonl"
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        deadline = time.monotonic() + 240
        while not (metrics.exists() and metrics.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= len(separate)
        workers = [child for child in children if "paceline.remote.host" in child.cmdline()]
        for worker in workers if number in (signal.SIGTERM, signal.SIGHUP) else ():
            worker.send_signal(number)  # as a scheduler does, and a terminal that is closed
        for _ in range(2 if number == signal.SIGHUP else 1):
            process.send_signal(number)
        fault.fired()
        output = process.communicate(timeout=240)[0]
        fault.detected()
    assert process.returncode == code, output
    assert "stopping after the current step" in output and "Traceback" not in output, output
    found = re.search(r"the same command continues from step (\d+)\n", output)
    steps = len(metrics.read_text().splitlines())
    assert found and int(found[1]) == steps, "a step is lost"
    verify_checkpoint(tmp_path / "run" / "checkpoints" / f"step_{steps:08d}")
    fault.audited(tmp_path / "run")
    assert not any(child.is_running() for child in children)
