"""Lookup of rewards by name: verifiers, tasks, entry points, and functions of files and modules.

Imports no torch and runs no user code, so that a typo is reported before anything is loaded.
"""

import ast
import difflib
import importlib.util
import os
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import entry_points
from pathlib import Path

from paceline.data.tasks import TASKS, get_task
from paceline.errors import ConfigError
from paceline.reward import verify

GROUP = "paceline.rewards"


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
    if name == "regex":
        return f"{verify.__name__}:regex"
    registered = {e.name: e.value for e in entry_points(group=GROUP)}
    if name in registered:
        return registered[name]
    known = [*verify.IN_PROCESS, "regex", *registered]
    close = difflib.get_close_matches(name, [*known, *TASKS], n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    raise ConfigError(
        f"reward.function = {name!r} is neither a verifier nor a task nor an entry point of "
        f"{GROUP!r}{hint} Known: {', '.join(known)}. "
        "Write a custom function as 'module:function' or 'file.py:function'."
    )


def check_name(name: str) -> None:
    """Raise ConfigError if no reward has this name, as far as that shows without importing it."""
    if builtin(name) is not None:
        return
    spec = locate(name)
    origin, _, function = spec.rpartition(":")
    if hasattr(sys.modules.get(origin), function.split(".")[0]):
        return
    file = Path(origin).expanduser() if origin.endswith(".py") else _module_file(origin, spec)
    if file is None:
        return
    try:
        tree = ast.parse(file.read_bytes())
    except (FileNotFoundError, IsADirectoryError):
        raise _error(
            spec, f"no file {str(file)!r} (relative paths start at {os.getcwd()})"
        ) from None
    except SyntaxError as e:
        problem = f"importing it raised SyntaxError: {e.msg} ({file}:{e.lineno})"
        raise _error(spec, problem) from None
    except (OSError, ValueError) as e:
        raise _error(spec, f"{file} cannot be read: {e}") from None
    names = list(_names(tree))
    if function.split(".")[0] not in names and not {"*", "__getattr__"} & set(names):
        functions = [n.name for n in tree.body if isinstance(n, _DEFINITIONS)]
        close = difflib.get_close_matches(function, functions, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        defined = ", ".join(n for n in functions if not n.startswith("_")) or "no functions"
        raise _error(spec, f"no {function!r} in {file}; it defines {defined}{hint}")


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _error(spec: str, problem: str) -> ConfigError:
    return ConfigError(f"reward.function = {spec!r}: {problem}")


def _module_file(module: str, spec: str) -> Path | None:
    """Return the source of a module, or None if it cannot be found without importing a package."""
    parent, *rest = module.split(".")
    try:
        found: ModuleSpec | None = importlib.util.find_spec(parent)
        for part in rest:
            if found is None:
                break
            parent = f"{parent}.{part}"
            if found.submodule_search_locations is None:
                return None
            found = PathFinder.find_spec(parent, found.submodule_search_locations)
    except (ImportError, ValueError):
        found = None
    if found is None:
        path = ", ".join(p or os.getcwd() for p in sys.path)
        raise _error(spec, f"no module {module!r}; searched {path}")
    is_source = found.has_location and found.origin is not None and found.origin.endswith(".py")
    return Path(found.origin) if is_source and found.origin else None


def _names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module binds outside of functions and classes, and `global` names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _DEFINITIONS):
            yield node.name
            inner = (n for n in ast.walk(node) if isinstance(n, ast.Global))
            yield from (name for n in inner for name in n.names)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        yield from _names(node)
