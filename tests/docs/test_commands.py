"""The `paceline` commands of the documents run, in an empty home, with few and small steps.

Commands of other programs and those with a word of NOT_RUN are parsed in test_blocks.py, not run.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

from paceline.cli import app
from tests.docs.commands import commands_in, split_output
from tests.docs.documents import ROOT, Block, blocks_of, documents, printed_commands
from tests.docs.test_blocks import named, write_files_of_reader
from tests.models import random_model

NOT_RUN = {"serve", "watch", "--probe"}  # run until they are stopped; measures for 20 s
TINY = ("groups_per_step=2", "group_size=2", "rollout.max_response_length=4", "placement.threads=1")
# Rollout and training in threads of this process: a process takes seconds to import torch.
ONE_PROCESS = ("placement.actor=main", "placement.rollout=main", "placement.overlap=true")
SMALLER = {
    "train": ("steps=2", "data.limit=256", *TINY),
    "sft": ("steps=2",),
    "simulate": ("steps=12",),
    "evaluate": ("data.limit=4", "rollout.max_response_length=4"),
}
# Steps that the printed run has and the short one has not.
STEPS = {"save_every=50": "save_every=1", "40": "1", "10:12": "1:2"}
VERL = """python3 -m verl.trainer.main_ppo data.train_files=verl.jsonl \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \\
    custom_reward_function.path=my_reward.py custom_reward_function.name=score
"""
RUNS = ("runs/one", "runs/two", "runs/old", "runs/earlier", "runs/fully_async")


def commands_of(page: Path) -> list[tuple[Block, list[str]]]:
    """Return the arguments of the `paceline` commands of a page that need no other hardware."""
    blocks = [block for block in blocks_of(page) if block.language == "bash" and not block.needs]
    found = [(block, words) for block in blocks for words in commands_in(block.text)]
    return [(block, words[1:]) for block, words in found if words[0] == "paceline"]


PAGES = [page for page in documents() if commands_of(page)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a home directory with a run in it, which is copied for pages that need one."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        use_home(home, patch)
        assert run(smaller(["train", "hybrid", f"run_dir={home}/run"])) == 0
    return home


def use_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_CACHE_HOME", "PACELINE_CACHE"):
        monkeypatch.delenv(name, raising=False)


def write_directory(folder: Path, page: Path, home: Path) -> None:
    """Write what a reader of the page has: files, a clone, and earlier runs."""
    write_files_of_reader(folder)
    for name in ("recipes", "examples"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "my_reward.py").write_text("def score(completion, row):\n    return 1.0\n")
    (folder / "run_qwen2-7b.sh").write_text(VERL)
    row = {"prompt": "say 1", "reward_model": {"ground_truth": "1"}}
    (folder / "verl.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    (folder / "costs.json").write_text("{}")  # all entries are optional
    (folder / "ppo.yaml").write_text("data: {train_batch_size: 8}\n")
    random_model(folder / "Qwen/Qwen2.5-0.5B-Instruct", hidden=16, layers=1)
    made = "runs/fully_async" if any(words[0] == "train" for _, words in commands_of(page)) else ""
    for name in RUNS:
        if name != made and name in page.read_text():
            shutil.copytree(home / "run", folder / name)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_of_page_run(
    page: Path,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    use_home(home, monkeypatch)
    write_directory(tmp_path, page, home)
    monkeypatch.chdir(tmp_path)
    for block, words in commands_of(page):
        if not NOT_RUN & {*words}:
            code = run(smaller(words))
            shown = capsys.readouterr()
            assert code == 0, f"{block.place}: paceline {' '.join(words)}\n{shown.out}{shown.err}"


def smaller(words: list[str]) -> list[str]:
    """Return the command with further settings that make it fast."""
    words = [re.sub(r"step_\d{8}", "step_00000002", STEPS.get(word, word)) for word in words]
    extra = list(SMALLER.get(words[0], ()))
    if words[0] == "train" and ("fully_async" in words[1] or "placement.actor=train" in words):
        extra += ONE_PROCESS
    return [*words, *extra]


def run(words: list[str]) -> int:
    """Run a command in this process and return its exit code."""
    try:
        app(words)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.mark.parametrize("block", printed_commands(), ids=lambda block: block.place)
def test_command_prints_output_of_block(
    block: Block, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    command, printed = split_output(block.text)
    (words,) = commands_in(command)
    run(words[1:])
    shown = capsys.readouterr()
    assert (shown.out + shown.err).split() == printed.split()
