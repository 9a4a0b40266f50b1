"""Checks of shell commands in the documents, without running them."""

import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from typer.main import get_command

from paceline.cli import app
from paceline.config import check_trainable, load_config
from paceline.supervised.config import load_sft_config
from tests.docs.documents import ROOT, Block

SHELL = {"cd", "cp", "export", "git", "mkdir", "source", "tail"}  # of every machine
LOADERS: dict[str, Callable[..., Any]] = {
    "train": load_config,
    "plan": load_config,
    "simulate": load_config,
    "evaluate": load_config,
    "sft": load_sft_config,
}


def commands_in(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of a script, without comments and variables before it."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars="&|;")
        words.whitespace_split, words.commenters = True, "#"
        command: list[str] = []
        for word in [*words, ";"]:
            if not re.fullmatch("[&|;]+", word):
                command.append(word)
            elif command:
                yield _without_variables(command)
                command = []


def split_output(text: str) -> tuple[str, str]:
    """Divide a block into the command, which may have several lines, and what it prints."""
    found = re.match(r"(?:.*\\\n)*.*\n", text)
    assert found
    return found[0], text[found.end() :]


def _without_variables(words: list[str]) -> list[str]:
    while len(words) > 1 and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    return words


def problems_of(block: Block) -> Iterator[str]:
    """Yield what is wrong with the commands of a block. The working directory has the files that
    they name."""
    for words in commands_in(block.text):
        try:
            check_command(words, block)
        except Exception as error:
            yield f"{block.place}: {shlex.join(words)}\n    {type(error).__name__}: {error}"


def check_command(words: list[str], block: Block) -> None:
    program, arguments = words[0], words[1:]
    if program == "paceline":
        check_paceline(arguments)
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        missing = [word for word in arguments if "=" not in word and word not in targets]
        assert not missing, f"no such target: {missing}"
        assert block.needs, "write how long it takes, for example <!-- needs: 5 minutes -->"
    elif program == "pip":
        check_extras(arguments)
    elif program == "python" and arguments[0] == "-m":
        assert find_spec(arguments[1]) or block.needs, f"no such module: {arguments[1]}"
    elif program in ("python", "bash") or program.startswith("./"):
        path = Path(program if program.startswith("./") else arguments[0])
        assert (ROOT / path).exists(), f"no such file: {path}"
        source = (ROOT / path).read_text()
        options = [word.partition("=")[0] for word in arguments if word.startswith("--")]
        unknown = [word for word in options if word not in _options_of(path, source)]
        assert not unknown, f"{path} has no option {unknown}"
        assert block.needs, "write how long it takes, for example <!-- needs: 5 minutes -->"
    else:
        assert program in SHELL or block.needs, (
            f"{program} is not a program of Paceline; write what it needs in the line before the "
            f"code block, for example <!-- needs: {program} -->"
        )


def _options_of(path: Path, source: str) -> str:
    """Return the text that mentions the options of a program, also of the module that it starts."""
    modules = re.findall(r"-m ([\w.]+)", source) if path.suffix == ".sh" else ()
    return source + "".join((ROOT / f"{name.replace('.', '/')}.py").read_text() for name in modules)


def check_extras(arguments: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in arguments:
        for extras in re.findall(r"(?:paceline|\.)\[(.*)\]", word):
            unknown = set(extras.split(",")) - set(project["optional-dependencies"])
            assert not unknown, f"no such extra: {unknown}"


def check_paceline(arguments: list[str]) -> None:
    """Parse a command as the program does; load recipe and settings if it has them."""
    command, name = get_command(app), "paceline"
    while hasattr(command, "commands") and not arguments[0].startswith("-"):
        name, arguments = arguments[0], arguments[1:]
        assert name in command.commands, f"no such command: {name}"
        command = command.commands[name]
    if hasattr(command, "commands"):  # options of paceline itself
        assert arguments[0] in {option for item in command.params for option in item.opts}
        return
    values = command.make_context(name, list(arguments)).params
    if name in LOADERS:
        config = LOADERS[name](values["recipe"], values["settings"] or ())
        if name == "train":
            check_trainable(config)


def check_inline(arguments: list[str]) -> None:
    """Check a command in a sentence: its name and options, whatever follows them."""
    command = get_command(app)
    options = {"--help", "--install-completion"}
    for word in arguments:
        options |= {option for item in command.params for option in item.opts}
        if word.startswith("--"):
            assert word.partition("=")[0] in options, f"no such option: {word}"
        elif hasattr(command, "commands"):
            for name in word.split("|"):
                assert name in command.commands, f"no such command: {name}"
            command = command.commands[word.split("|")[0]]
