"""Lookup of rewards by name: verifiers, tasks, entry points, and functions of files and modules.

Imports no torch and runs no user code, so that a typo is reported before anything is loaded.
"""

import difflib
from importlib.metadata import entry_points

from paceline.code_search import CodeNotFound, find_code
from paceline.data.tasks import TASKS, get_task
from paceline.errors import ConfigError
from paceline.reward import python_tests, verify

GROUP = "paceline.rewards"
JUDGE = "judge"  # a language model, as reward.judge says
# Built-in functions that run in separate processes, as custom ones do.
IN_PROCESSES = {
    "regex": f"{verify.__name__}:regex",
    "python_tests": f"{python_tests.__name__}:python_tests",
}


def builtin(name: str) -> verify.Function | None:
    """Return the built-in function that a verifier's or task's name stands for, if it is one."""
    if name in verify.IN_PROCESS:
        return verify.IN_PROCESS[name]
    task, colon, difficulty = name.partition(":")
    if task in TASKS and not (colon and difficulty.isidentifier()):
        return get_task(name).score
    return None


def locate(name: str) -> str:
    """Return the "module:function" or "file.py:function" that a name stands for."""
    if ":" in name:
        return name
    if name in IN_PROCESSES:
        return IN_PROCESSES[name]
    registered = {e.name: e.value for e in entry_points(group=GROUP)}
    if name in registered:
        return registered[name]
    known = [*verify.IN_PROCESS, *IN_PROCESSES, JUDGE, *registered]
    close = difflib.get_close_matches(name, [*known, *TASKS], n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    raise ConfigError(
        f"reward.function = {name!r} is neither a verifier nor a task nor an entry point of "
        f"{GROUP!r}{hint} Known: {', '.join(known)}. "
        "Write a custom function as 'module:function' or 'file.py:function'."
    )


def check_name(name: str) -> None:
    """Raise ConfigError if no reward has this name, as far as that shows without importing it."""
    if builtin(name) is not None or name == JUDGE:
        return
    spec = locate(name)
    try:
        find_code(spec)
    except CodeNotFound as problem:
        raise ConfigError(f"reward.function = {spec!r}: {problem}") from None
