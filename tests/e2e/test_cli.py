"""The command line as a user meets it: what goes wrong is said in one clear message, with the right exit code."""

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

from paceline.cli import _log_to_console, app
from paceline.config import describe_settings, differences, load_config
from paceline.run_dir import lock_run_dir
from tests.models import random_model
from tests.processes import children

ROOT = Path(__file__).parents[2]
REWARDS = ROOT / "tests" / "rewards.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def recipe(model: str, tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(
        f'model = "{model}"\nsteps = 2\ngroups_per_step = 2\ngroup_size = 2\nrun_dir = "{tmp_path}/run"\n'
        f'[data]\ntask = "copy:3"\nmax_prompt_length = 32\n[rollout]\nmax_response_length = 4\n[placement]\nthreads = 1\n'
    )
    return path


def paceline(*args: object) -> Result:
    return CliRunner().invoke(app, ["train", *(str(arg) for arg in args)])


def refused(result: Result, code: int, *words: str) -> None:
    said = " ".join(result.output.split())
    assert result.exit_code == code, result.output
    for word in words:
        assert word in said, f"{word!r} is not in: {said}"
    assert "Traceback" not in said
    assert not children(), "a process was left behind"


def test_a_run_leaves_a_summary_metrics_ledger_and_checkpoint(recipe: Path, tmp_path: Path) -> None:
    result = paceline(recipe)
    assert result.exit_code == 0, result.output
    assert "The run in figures" in result.output
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
        "queue_utilisation",
        "rollout_busy_fraction",
        "train_busy_fraction",
        "memory_peak_bytes",
        "ledger",
    }
    assert expected <= summary.keys()
    assert (
        len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == summary["steps"] == 2
    )
    assert (tmp_path / "run" / "ledger.jsonl").exists() and (
        tmp_path / "run" / "checkpoints" / "step_00000002"
    ).is_dir()
    shown = CliRunner().invoke(app, ["answers", str(tmp_path / "run"), "--step", "1"])
    assert (
        shown.exit_code == 0
        and "step 1: copy:3" in shown.output
        and shown.output.count("reward ") == 2
    ), shown.output
    again = paceline(recipe)
    assert again.exit_code == 0 and "2 of 2 steps" in again.output, again.output


def test_starting_over_moves_the_old_run_aside_but_not_from_under_a_running_one(
    recipe: Path, tmp_path: Path
) -> None:
    assert paceline(recipe, "steps=1").exit_code == 0
    with lock_run_dir(Path(load_config(recipe).run_dir)):
        refused(paceline(recipe, "--fresh"), 10, "in use by another run")
    refused(
        paceline(recipe, "--fresh", "data.path=nowhere.jsonl", "reward.function=exact"),
        3,
        "nowhere.jsonl",
    )
    refused(paceline(recipe, "--fresh", "reward.function=nowhere.py:score"), 2, "nowhere.py")
    assert (tmp_path / "run" / "summary.json").exists()
    assert "is now in" in paceline(recipe, "steps=1", "--fresh").output
    assert len(list(tmp_path.glob("run*/summary.json"))) == 2


def test_when_no_checkpoint_is_whole_the_run_does_not_start_over_by_itself(
    recipe: Path, tmp_path: Path
) -> None:
    assert paceline(recipe).exit_code == 0
    (tmp_path / "run" / "checkpoints" / "step_00000002" / "state.json").write_text("{")
    refused(paceline(recipe, "steps=3"), 10, "state.json is damaged", "no checkpoint", "--fresh")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            "schedule.max_stalenes=3",
            ["unknown setting 'schedule.max_stalenes'", "did you mean 'max_staleness'"],
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
        ("data=3", ["data = 3: this is a section", "data.task=..."]),
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
def test_a_wrong_setting_is_named_with_what_to_do(
    setting: str, words: list[str], recipe: Path, tmp_path: Path
) -> None:
    refused(paceline(recipe, setting), 2, *words)
    assert not (tmp_path / "run").exists()


def test_every_setting_is_listed_as_it_is_written() -> None:
    listed = describe_settings()
    written = [
        f"{name}={default}"
        for name, default, _ in listed
        if default != "unset" and "lora" not in name
    ]
    assert load_config(None, written) == load_config(None) and len(listed) > 60
    shown = CliRunner().invoke(app, ["settings", "data.on"]).output
    assert "data.on_bad_row" in shown and "One of fail, skip." in shown and "rollout" not in shown


def test_a_run_goes_on_with_more_time_or_less_memory_but_not_with_another_task() -> None:
    before = load_config(None, ["data.task=sort:5"]).model_dump(mode="json")
    patient = load_config(
        None,
        [
            "data.task=sort:5",
            "rollout.generation_timeout=900",
            "reward.timeout_s=60",
            "train.micro_batch_tokens=512",
        ],
    )
    assert differences(before, patient.model_dump(mode="json")) == []
    other = load_config(None, ["data.task=copy:5", "rollout.slots=8"]).model_dump(mode="json")
    assert differences(before, other) == ["data.task: was 'sort:5', is now 'copy:5'"]


def test_an_engine_has_no_more_slots_than_attempts_can_be_under_way() -> None:
    few = ["groups_per_step=2", "group_size=4", "rollout.slots=256"]
    assert load_config(None, few).slots == 8
    assert load_config(None, [*few, "schedule.max_staleness=2"]).slots == 24
    assert load_config(None, [*few, "algorithm.name=remax"]).slots == 10
    assert load_config(None, [*few, "rollout.slots=3"]).slots == 3


def test_the_documents_names_are_accepted_and_win_over_the_recipe(recipe: Path) -> None:
    result = paceline(
        recipe,
        "schedule.staleness_threshold=3",
        "total_training_steps=7",
        "train_batch_size=3",
        "--dry-run",
    )
    shown = json.loads(result.output)
    assert (shown["schedule"]["max_staleness"], shown["steps"], shown["groups_per_step"]) == (
        3,
        7,
        3,
    )


def test_prompts_and_judge_of_the_command_line_replace_those_of_the_recipe_but_not_each_other(
    recipe: Path,
) -> None:
    recipe.write_text(recipe.read_text() + '[reward]\nfunction = "exact"\n')
    shown = json.loads(
        paceline(recipe, "data.path=mine.jsonl", "reward.model=judge", "--dry-run").output
    )
    assert (shown["data"]["task"], shown["data"]["path"]) == (None, "mine.jsonl")
    assert (shown["reward"]["function"], shown["reward"]["model"]) == (None, "judge")
    refused(
        paceline(recipe, "data.path=mine.jsonl", "data.task=sort:5"),
        2,
        "data: task = 'sort:5' and path = 'mine.jsonl' are both set",
    )


def test_the_commands_of_the_readme_have_valid_settings() -> None:
    commands = [
        line.split()
        for line in (ROOT / "README.md").read_text().replace("\\\n", " ").splitlines()
        if "paceline train recipes/" in line
    ]
    assert len(commands) >= 2
    for words in commands:
        start = words.index("train") + 1
        result = paceline(
            ROOT / words[start], *(word for word in words[start + 1 :] if "=" in word), "--dry-run"
        )
        assert result.exit_code == 0, f"{words}: {result.output}"


def test_python_m_paceline_is_the_command_line() -> None:
    said = subprocess.run(
        [sys.executable, "-m", "paceline", "--help"], capture_output=True, text=True
    ).stdout
    assert "Usage: paceline" in said


def test_a_missing_or_broken_recipe_is_named(recipe: Path, tmp_path: Path) -> None:
    refused(paceline(tmp_path / "recipee.toml"), 2, "does not exist", "did you mean", "recipe.toml")
    recipe.write_text("steps = = 3")
    refused(paceline(recipe), 2, "not valid TOML", "line 1")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["empty"]),
        ('{"prompt": "a"}\n{"promt": "b"}\n', ["2", "prompt"]),
        ('{"prompt": "a"}\nnot json\n', ["2", "JSON"]),
        ('{"prompt": "a"}\n{"prompt": ""}\n', ["2", "empty"]),
        ('{"prompt": "a"}\n{"prompt": 5}\n', ["2"]),
        ('{"prompt": "' + "a" * 60 + '"}\n', ["1", "max_prompt_length = 32"]),
    ],
)
def test_bad_data_is_named_by_row(
    content: str, words: list[str], recipe: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(content)
    recipe.write_text(recipe.read_text().replace('task = "copy:3"', f'path = "{data}"'))
    refused(paceline(recipe, "reward.function=exact"), 3, "data.jsonl", *words)
    assert not (tmp_path / "run").exists()


def test_missing_data_and_model_are_named(recipe: Path, tmp_path: Path) -> None:
    refused(paceline(recipe, "model=./nowhere"), 4, "nowhere")
    recipe.write_text(recipe.read_text().replace('task = "copy:3"', 'path = "gone.jsonl"'))
    refused(paceline(recipe, "reward.function=exact"), 3, "gone.jsonl")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("raises", ["raises", "KeyError", "no such column"]),
        ("nothing", ["nothing", "None"]),
        ("nan", ["nan"]),
        ("hangs", ["hangs", "0.5 s"]),
    ],
)
def test_a_reward_that_fails_ends_the_run_with_its_story_and_trains_nothing(
    function: str, words: list[str], recipe: Path, tmp_path: Path
) -> None:
    result = paceline(recipe, f"reward.function={REWARDS}:{function}", "reward.timeout_s=0.5")
    refused(result, 5, *words, "rollout.max_failed_groups = 0")
    assert not (tmp_path / "run" / "checkpoints").exists()
    events = [
        json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()
    ]
    assert {event["event"] for event in events} == {"issued", "dropped"}


def test_what_a_reward_prints_is_in_the_logs_of_the_run(recipe: Path, tmp_path: Path) -> None:
    assert paceline(recipe, f"reward.function={REWARDS}:prints").exit_code == 0
    assert "reward output: scoring" in (tmp_path / "run" / "logs" / "main.log").read_text()


def test_the_parts_of_a_reward_are_in_metrics_and_answers(recipe: Path, tmp_path: Path) -> None:
    assert paceline(recipe, f"reward.function={REWARDS}:in_parts", "steps=1").exit_code == 0
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    answers = json.loads((tmp_path / "run" / "samples.jsonl").read_text().splitlines()[0])[
        "answers"
    ]
    assert row["reward_component/length"] > 0 and all(
        answer["details"] == {"length": len(answer["text"])} for answer in answers
    )


def test_a_row_without_an_answer_is_refused_before_anything_starts(
    recipe: Path, tmp_path: Path
) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b"}\n')
    refused(
        paceline(recipe, f"data.path={tmp_path}/data.jsonl", "reward.function=exact"),
        3,
        "data.jsonl:2",
        "no 'answer'",
    )
    assert not (tmp_path / "run").exists()


def test_failed_groups_within_the_budget_are_dropped_by_name_and_never_trained(
    recipe: Path, tmp_path: Path
) -> None:
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


def test_a_run_that_cannot_learn_says_so_loudly(recipe: Path) -> None:
    result = paceline(recipe, f"reward.function={REWARDS}:always_one")
    said = " ".join(result.output.split())
    assert (
        result.exit_code == 0
        and "every token has advantage 0" in said
        and "the step changed no weight" not in said
    ), said


def test_help_and_wrong_settings_need_no_torch() -> None:
    check = "import sys, paceline.cli, paceline.config; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


def test_warnings_are_shown_and_tracebacks_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    _log_to_console()
    try:
        logging.getLogger("paceline.test").warning("look here")
        try:
            raise ValueError("deep inside")
        except ValueError:
            logging.getLogger("paceline.test").exception("it failed")
    finally:
        logging.getLogger("paceline").handlers.clear()
    said = capsys.readouterr().out
    assert "look here" in said and "deep inside" not in said


def test_every_recipe_is_valid() -> None:
    for path in sorted((ROOT / "recipes").glob("*.toml")):
        result = paceline(path, "--dry-run")
        assert result.exit_code == 0, f"{path}: {result.output}"


@pytest.mark.parametrize("ignoring", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_a_schedulers_signal_stop_everything_and_say_how_to_go_on(
    number: int, code: int, ignoring: bool, recipe: Path, tmp_path: Path
) -> None:
    """`ignoring`: Ctrl-C, as a shell has it for what it starts in the background."""
    separate = ["placement.actor=train", "placement.rollout=rollout"]
    command = [
        sys.executable,
        "-m",
        "paceline.cli",
        "train",
        str(recipe),
        "steps=100000",
        "save_every=1",
        *separate,
    ]
    if ignoring:
        command = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *command]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        saved = tmp_path / "run" / "checkpoints" / "step_00000001"
        deadline = time.monotonic() + 240
        while not saved.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.send_signal(number)
        output = process.communicate(timeout=30)[0]
    assert (
        process.returncode == code
        and re.search(r"the same command continues from step \d+\n", output)
        and "Traceback" not in output
    ), output
    assert not any(child.is_running() for child in children)
