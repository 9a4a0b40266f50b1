"""Code search: finds what a module defines without importing it."""

from pathlib import Path

import pytest

from paceline.code_search import CodeNotFound, find_code

CODE = """
from os.path import join as joined
import json
if True:
    async def score(completion, row): ...
first, (second, third) = 1, (2, 3)
class Agent:
    def method(self):
        global made
        inner = made = 1
raise SystemExit("importing this file would end the program")
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "code.py"
    file.write_text(CODE)
    return file


@pytest.mark.parametrize(
    "name", ["joined", "json.loads", "score", "first", "third", "Agent.run", "made"]
)
def test_search_finds_every_kind_of_definition(name: str, file: Path) -> None:
    find_code(f"{file}:{name}")


@pytest.mark.parametrize("name", ["inner", "method", "scores"])
def test_search_lists_definitions_when_name_is_missing(name: str, file: Path) -> None:
    with pytest.raises(CodeNotFound, match=f"no '{name}' in .*code.py; it defines score, Agent"):
        find_code(f"{file}:{name}")


def test_search_accepts_any_name_when_file_imports_all(file: Path) -> None:
    file.write_text("from os import *\n")
    find_code(f"{file}:anything")


def test_search_finds_modules_and_code_of_program() -> None:
    find_code("json.decoder:JSONDecoder")
    find_code("__main__:anything")
    find_code(f"{__name__}:CODE")
    with pytest.raises(CodeNotFound, match=r"no module 'json\.decode'; searched"):
        find_code("json.decode:JSONDecoder")
