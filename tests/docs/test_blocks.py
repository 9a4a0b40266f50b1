"""Every program of the documents is run, or checked if a comment before it says what it needs.

Programs run as printed, with small random models instead of those of the hub and with few steps.
"""

import ast
import builtins
import importlib
import itertools
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import paceline
from paceline.config import RunConfig, describe_settings, load_config
from paceline.errors import ConfigError
from paceline.supervised.config import SftConfig, load_sft_config
from tests.docs.commands import check_inline, problems_of, split_output
from tests.docs.documents import ROOT, all_blocks, blocks_of, documents, printed_commands
from tests.models import random_model

LANGUAGES = {"", "bash", "json", "python", "text", "toml", "yaml"}
HUB_ID = re.compile(r"""(?<=["'])(?:Qwen|HuggingFaceTB|meta-llama)/[\w.-]+(?=["'])""")
RUNS = {
    "groups_per_step": 2,
    "group_size": 2,
    "rollout.max_response_length": 4,
    "placement.threads": 1,
    "display": False,
}
FEW = {"train": {"steps": 2, **RUNS}, "steps": {"steps": 2, **RUNS}, "sft": {"steps": 1}}
PAGES = [page for page in documents() if any(b.language == "python" for b in blocks_of(page))]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a directory with the files of a reader."""
    write_files_of_reader(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_files_of_reader(folder: Path) -> None:
    """Write files under the names that the documents use."""
    row = {"prompt": "say 1", "answer": "1", "completion": "1"}
    for name in ("prompts", "held_out", "examples"):
        (folder / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    for name in ("recipe", "my_recipe", "qwen"):
        shutil.copy(ROOT / "recipes" / "hybrid.toml", folder / f"{name}.toml")
    (folder / "verl.yaml").write_text("data: {train_batch_size: 8}\n")
    for block in all_blocks("toml"):
        if first := re.match(r"# (\w+\.toml)\n", block.text):
            (folder / first[1]).write_text(block.text)


def test_block_has_known_language() -> None:
    blocks = (block for page in documents() for block in blocks_of(page))
    unknown = [f"{b.place}: {b.language}" for b in blocks if b.language not in LANGUAGES]
    assert not unknown, f"{unknown}; expected one of {sorted(LANGUAGES)}"


@pytest.mark.usefixtures("folder")
def test_command_in_block_has_valid_options_and_settings() -> None:
    printed = [replace(block, text=split_output(block.text)[0]) for block in printed_commands()]
    problems = [
        problem for block in (*all_blocks("bash"), *printed) for problem in problems_of(block)
    ]
    assert not problems, "\n".join(problems)


def test_script_in_block_is_valid_bash() -> None:
    for block in all_blocks("bash"):
        done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
        assert done.returncode == 0, f"{block.place}: {done.stderr}"


def test_command_in_sentence_has_valid_options() -> None:
    problems = []
    for page in documents():
        for code in re.findall(r"(?<!`)`paceline ([^`\n]+)`", page.read_text()):
            try:
                check_inline(shlex.split(code, comments=True))
            except (AssertionError, ValueError) as error:
                problems.append(f"{named(page)}: paceline {code}: {error}")
    assert not problems, "\n".join(problems)


def test_setting_in_sentence_exists() -> None:
    """A name in code, for example `schedule.max_staleness`, whose group is one of the settings."""
    known = {name for model in (RunConfig, SftConfig) for name, *_ in describe_settings("", model)}
    groups = {name.rpartition(".")[0] for name in known} - {""}
    foreign = {"docs/verl.md", "docs/areal.md", "docs/trl.md"}  # also have names of others
    problems = []
    for page in documents():
        for name in re.findall(r"(?<!`)`([a-z_]+(?:\.[a-z_0-9]+)+)(?:`| ?=)", page.read_text()):
            group, _, last = name.rpartition(".")
            if group not in groups or last == "py":  # also the name of a file
                continue
            if name not in known and named(page) not in foreign:
                problems.append(f"{named(page)}: no setting {name}")
    assert not problems, "\n".join(problems)


@pytest.mark.usefixtures("folder")
def test_settings_in_block_are_valid() -> None:
    problems = []
    for block in all_blocks("toml"):
        errors = []
        for load in (load_config, load_sft_config):
            try:
                load(None, (), tomllib.loads(block.text))
            except ConfigError as error:
                errors.append(f"{load.__name__}: {error}")
        if len(errors) == 2:
            problems.append(f"{block.place}: " + "; ".join(errors))
    assert not problems, "\n".join(problems)


def test_data_in_block_is_valid() -> None:
    for block in all_blocks("json"):
        for line in block.text.splitlines():
            json.loads(line)
    for block in all_blocks("yaml"):
        list(yaml.safe_load_all(block.text))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_programs_of_page_run(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs of a page share their names, as in a notebook."""
    for name, settings in FEW.items():
        monkeypatch.setattr(paceline, name, _with(getattr(paceline, name), settings))
    names: dict[str, Any] = {
        "__name__": "__main__",
        "paceline": paceline,
        "score": lambda completion, row: float(row["answer"] in completion),
    }
    for block in blocks_of(page):
        if block.language != "python":
            continue
        program = HUB_ID.sub(lambda found: _model(folder / found[0]), block.text)
        code = compile(program, block.place, "exec")
        if block.needs:
            check_names(ast.parse(program), set(names), block.place)
        elif not block.is_excerpt:
            try:
                exec(code, names)
            except Exception as error:
                raise AssertionError(
                    f"{block.place}: {type(error).__name__}: {error}. If the program needs a GPU, "
                    "a network or another package, say so in the line before the code block: "
                    "<!-- needs: one GPU -->"
                ) from error


def _with(function: Callable[..., Any], settings: dict[str, Any]) -> Callable[..., Any]:
    """Return the function with these settings and a new run directory for each call."""
    number = itertools.count()

    def call(*args: Any, **given: Any) -> Any:
        fallback = {"run_dir": f"runs/{function.__name__}_{next(number)}"}
        return function(*args, **fallback | given | settings)

    return call


def _model(folder: Path) -> str:
    return str(folder) if folder.exists() else random_model(folder, hidden=16, layers=1)


def check_names(program: ast.Module, known: set[str], place: str) -> None:
    """Check a program that cannot run here: its imports exist, and so do the names that it uses."""
    known = known | set(dir(builtins)) | set(_imported(program, place))
    for node in ast.walk(program):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            known.add(node.name)
        elif isinstance(node, ast.arg):
            known.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            known.add(node.id)
    used = {node.id for node in ast.walk(program) if isinstance(node, ast.Name)}
    assert used <= known, f"{place}: names that nothing defines: {sorted(used - known)}"


def _imported(program: ast.Module, place: str) -> Iterator[str]:
    for node in ast.walk(program):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if node.module.split(".")[0] == "paceline":
                    found = hasattr(importlib.import_module(node.module), alias.name)
                    assert found, f"{place}: {node.module} has no {alias.name}"
                yield alias.asname or alias.name
        elif isinstance(node, ast.Import):
            yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
