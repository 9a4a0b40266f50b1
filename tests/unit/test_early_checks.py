"""Early checks: a wrong name in the settings is reported in a second, without importing torch."""

import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from paceline.config import load_config
from paceline.data.prompts import DataSettings
from paceline.early_checks import check_early, check_given_rows
from paceline.errors import CheckpointError, ConfigError, DataError, ModelError, PacelineError

CODE = """
if True:
    async def score(completion, row): ...
class Agent:
    def hidden(self):
        inner = 1
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a directory with prompts, a reward function and a model."""
    row = {"question": "1 + 1", "solution": {"value": "2"}}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "prompts.csv").write_text("question,solution\n1 + 1,2\n")
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "models" / "good").mkdir(parents=True)
    (tmp_path / "models" / "good" / "model.safetensors").touch()
    (tmp_path / "models" / "good" / "config.json").touch()
    (tmp_path / "models" / "empty" / "actor").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # unreachable
    return tmp_path


@pytest.fixture
def hub() -> Iterator[str]:
    """Serve a hub without models; return its address."""

    class Empty(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Empty) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


RECIPE = """
model = "models/good"
data = {path = "prompts.jsonl", prompt_key = "question", answer_key = "solution.value"}
reward.function = "code.py:score"
rollout.environment = "code.py:Agent"
"""


def check(*overrides: str, trains: bool = True) -> None:
    check_early(load_config("recipe.toml", overrides), trains=trains)


@pytest.mark.parametrize(
    "override",
    [
        "model=tiny",
        "model=tiny:sort:5",
        "model=owner/name",
        "data.path=prompts.*",
        'data.path=["prompts.csv", "prompts.jsonl"]',
        "data.task=sort:5",
        "reward.function=exact",
        "reward.model=owner/name",
        "rollout.environment=json.decoder:JSONDecoder",
        "data.curriculum=adaptive",
        "run_dir=a/new/directory",
    ],
)
def test_check_accepts_what_exists(override: str) -> None:
    check()
    check(override)


@pytest.mark.parametrize(
    ("override", "error", "message"),
    [
        ("data.path=promts.jsonl", DataError, "no data file.*; did you mean 'prompts.jsonl'"),
        ("data.path=", DataError, "no data file at ''"),
        ("data.path=nowhere/*.jsonl", DataError, "no data file.*; check data.path"),
        ("data.path=code.py", DataError, "cannot read .py"),
        ("data.prompt_key=qestion", DataError, "no column 'qestion' .*data.prompt_key=question"),
        ("data.answer_key=solutio.value", DataError, "no such column .*: question, solution"),
        ("algorithm.loss=code.py:los", ConfigError, "algorithm.loss = .*no 'los' in code.py"),
        ("data.source=code.py:rows", ConfigError, "data.source = .*no 'rows' in code.py"),
        ("track=code.py:Snk", ConfigError, "track = .*no 'Snk' in code.py"),
        ("model=./models/god", ModelError, "no such file or directory.*did you mean 'models/good'"),
        ("model=", ModelError, "model = '': no such file or directory"),
        ("model=runs/default", ModelError, "no such file or directory"),
        ("model=~no-such-user/model", ModelError, "no such file or directory"),
        ("model=my models/good", ModelError, "no such file .*not a valid Hugging Face model ID"),
        ("model=models/empty", ModelError, "no weights .*; did you mean model=models/empty/actor"),
        ("model=prompts.csv", ModelError, "model = 'prompts.csv' is a file; expected"),
        ("model=q4.gguf", ModelError, "no such file or directory"),
        ("model=tiny:srot", ConfigError, "did you mean 'sort'"),
        ("reward.model=./nowhere", ModelError, "reward.model = './nowhere': no such file"),
        ("reward.function=cod.py:score", ConfigError, "no file 'cod.py' .*did you mean 'code.py'"),
        ("reward.function=code.py:scores", ConfigError, "no 'scores' in code.py; .*'score'"),
        (
            "reward.function=code.py:inner",
            ConfigError,
            "no 'inner' in code.py; it defines score, Agent",
        ),
        ("reward.function=broken.py:f", ConfigError, r"SyntaxError: .* \(broken.py:1\)"),
        ("rollout.environment=nowhere:Agent", ConfigError, "no module 'nowhere'; searched"),
        ("data.curriculum=code.py:Agnt", ConfigError, "data.curriculum = .*did you mean 'Agent'"),
        ("run_dir=code.py/run", CheckpointError, "code.py is not a directory"),
    ],
)
def test_check_names_what_does_not_exist(
    override: str, error: type[PacelineError], message: str
) -> None:
    with pytest.raises(error, match=message):
        check(override)


def test_check_requires_prompts_and_reward() -> None:
    with pytest.raises(ConfigError, match="there are no prompts"):
        check_early(load_config())
    only_data = load_config(overrides=["data.path=prompts.csv", "data.prompt_key=question"])
    with pytest.raises(ConfigError, match=r"prompts from data\.path need a reward"):
        check_early(only_data)
    check_early(only_data, has_reward=True)
    check_early(load_config(), has_rows=True, has_reward=True)


def test_check_leaves_columns_to_full_check_when_bad_rows_are_skipped() -> None:
    check("data.prompt_key=other", "data.on_bad_row=skip")


@pytest.mark.parametrize(
    ("override", "package"),
    [("cluster=ray", "ray"), ("train.backend=megatron", "megatron"), ("train.lora.rank=4", "peft")],
)
def test_check_names_missing_package(
    override: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"package {package} is not installed; run pip install"):
        check(override)
    check(override, trains=False)


def test_check_accepts_functions_of_program() -> None:
    check_early(
        load_config("recipe.toml", values={"algorithm.loss": lambda ratio: ratio, "track": [print]})
    )


@pytest.mark.parametrize("command", ["train", "evaluate", "plan"])
def test_command_reports_typo_quickly_and_without_torch(command: str) -> None:
    program = (
        "import sys, atexit\n"
        "atexit.register(lambda: print({'torch', 'transformers', 'pyarrow'} & {*sys.modules}))\n"
        "from paceline.cli import app\napp()"
    )
    arguments = [command, "recipe.toml", "data.path=nope.jsonl"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 3 and "no data file at 'nope.jsonl'" in result.stderr
    assert result.stdout == "set()\n"
    # CPU time, because other processes of the machine slow down the clock on the wall. It takes
    # half a second on a quiet machine; a busy one needs twice as much for the same work.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.5


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "the Hugging Face hub has no such model"),
        ({"HF_HUB_OFFLINE": "1"}, "is not in the cache of Hugging Face models"),
    ],
)
def test_command_reports_unknown_hub_model(
    environment: dict[str, str], message: str, hub: str, folder: Path
) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "paceline", "plan", "recipe.toml", "model=owner/nowhere"],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(folder / "hf"), **environment},
    )
    assert result.returncode == 4 and message in result.stderr, result.stderr


MISTAKES = {
    "paceline.train(data='nope.jsonl', reward='exact')": "no data file at 'nope.jsonl'",
    "paceline.evaluate(data='nope.jsonl', reward='exact')": "no data file at 'nope.jsonl'",
    "paceline.train(model='tiny', data=bad, reward=score)": (
        "no column 'prompt' in the rows given as data; columns found: promt. "
        "Select the prompt column, for example data.prompt_key=promt"
    ),
    "paceline.evaluate(model='tiny', data=good, reward=score, **wrong_key)": (
        "data.answer_key = 'anser': no such column in the rows given as data; "
        "columns found: prompt, answer, completion; did you mean 'answer'?"
    ),
    "paceline.steps(model='tiny', data=good, evaluation_data=bad, reward=score)": (
        "no column 'prompt' in the rows given as evaluation_data; columns found: promt."
    ),
    "paceline.sft(model='tiny', data=bad)": (
        "in the rows given as data; columns found: promt. Select them, for example "
        "data.prompt_key=promt data.completion_key=NAME"
    ),
    "paceline.sft(model='tiny', data=good, validation=bad)": (
        "in the rows given as validation; columns found: promt."
    ),
    "GRPOTrainer('models/good', score, train_dataset=bad)": (
        "train_dataset has no column 'prompt', but promt. Rename the column with the prompt, "
        "for example rename_column('promt', 'prompt')"
    ),
    "GRPOTrainer('models/good', score, train_dataset=good, eval_dataset=bad)": (
        "eval_dataset has no column 'prompt', but promt."
    ),
    "GRPOTrainer('./models/god', score, train_dataset=good)": (
        "model = './models/god': no such file or directory"
    ),
    "GRPOTrainer('models/good', './nowhere', train_dataset=good)": (
        "reward_funcs = './nowhere': no such file or directory"
    ),
}
PROGRAM = f"""
import json, sys, time
import paceline
from paceline.trl import GRPOTrainer

def score(completion, row): ...

good, bad = [{{"prompt": "1", "answer": "1", "completion": "1"}}], [{{"promt": "1"}}]
wrong_key = {{"data.answer_key": "anser"}}
found = []
for call in {list(MISTAKES)!r}:
    started = time.process_time()
    try:
        eval(call)
    except paceline.PacelineError as error:
        found.append([str(error), "torch" in sys.modules, time.process_time() - started])
print(json.dumps(found))
"""


def test_program_reports_mistake_quickly_and_without_torch(folder: Path) -> None:
    (folder / "program.py").write_text(PROGRAM)
    result = subprocess.run([sys.executable, "program.py"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    for (call, message), (said, torch, cpu_s) in zip(MISTAKES.items(), found, strict=True):
        assert message in said, call
        assert not torch and cpu_s < 1, call


def test_check_takes_no_row_of_iterator() -> None:
    rows = iter([{"promt": "1"}, {"promt": "2"}])
    check_given_rows(DataSettings(), rows, "data")
    assert len(list(rows)) == 2


def test_check_of_given_rows_leaves_other_objects_to_full_check() -> None:
    class Broken(list[object]):
        def __iter__(self) -> Iterator[object]:
            raise RuntimeError

    for rows in ([], ["text"], {"train": []}, Broken()):
        check_given_rows(DataSettings(), rows, "data")
    check_given_rows(DataSettings(on_bad_row="skip"), [{"promt": "1"}], "data")


def test_tracker_without_its_package_is_reported_with_command_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = load_config(None, ["data.task=copy:3", 'track=["wandb"]'])
    message = r"track = 'wandb': .* run pip install 'paceline\[wandb\]'"
    with pytest.raises(ConfigError, match=message):
        check_early(config)


def test_check_names_run_directory_whose_name_is_too_long() -> None:
    with pytest.raises(CheckpointError, match="File name too long; expected a writable directory"):
        check_early(load_config(overrides=["data.task=copy:3", f"run_dir={'x' * 300}"]))


@pytest.mark.parametrize("run_dir", ["link", "link/run"])
def test_check_names_link_to_directory_that_does_not_exist(run_dir: str, folder: Path) -> None:
    (folder / "link").symlink_to("/unmounted/disk")
    with pytest.raises(CheckpointError, match="link is a link to /unmounted/disk, which does not"):
        check_early(load_config(overrides=["data.task=copy:3", f"run_dir={folder}/{run_dir}"]))
