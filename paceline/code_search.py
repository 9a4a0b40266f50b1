"""Search for a function or class in source code, without importing it.

Imports only the standard library: it runs before anything else is loaded.
"""

import ast
import difflib
import importlib.util
import os
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class CodeNotFound(Exception):
    """A spec that names no code. Callers add the name of the setting to the message."""


def find_code(spec: str) -> None:
    """Raise CodeNotFound if "file.py:name" or "module:name" names nothing.

    Code that shows only when a package is imported is not searched.
    """
    origin, _, name = spec.rpartition(":")
    name = name.partition(".")[0]
    given = origin == "__main__" or "<" in spec  # a function of the program, such as "<lambda>"
    if given or hasattr(sys.modules.get(origin), name):
        return
    file = Path(origin).expanduser() if origin.endswith(".py") else _module_file(origin)
    if file is None:
        return
    try:
        tree = ast.parse(file.read_bytes())
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        near = [other.name for other in file.parent.glob("*.py")]
        hint = _hint(file.name, near)
        raise CodeNotFound(
            f"no file {str(file)!r} (relative paths start at {os.getcwd()}){hint}"
        ) from None
    except SyntaxError as e:
        raise CodeNotFound(
            f"importing it raised SyntaxError: {e.msg} ({file}:{e.lineno})"
        ) from None
    except (OSError, ValueError) as e:
        raise CodeNotFound(f"{file} cannot be read: {e}") from None
    defined = dict(_names(tree))
    if name not in defined and not {"*", "__getattr__"} & defined.keys():
        public = [n for n, is_code in defined.items() if is_code and not n.startswith("_")]
        listed = ", ".join(public) or "no functions"
        raise CodeNotFound(f"no {name!r} in {file}; it defines {listed}{_hint(name, public)}")


def _hint(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _module_file(module: str) -> Path | None:
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
        raise CodeNotFound(f"no module {module!r}; searched {path}")
    is_source = found.has_location and found.origin is not None and found.origin.endswith(".py")
    return Path(found.origin) if is_source and found.origin else None


def _names(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield the names that a module binds outside of functions and classes, and `global` names.

    Each comes with whether it is the name of a function or class.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, DEFINITIONS):
            yield node.name, True
            inner = (n for n in ast.walk(node) if isinstance(n, ast.Global))
            yield from ((name, False) for n in inner for name in n.names)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield (alias.asname or alias.name).split(".")[0], False
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, False
        yield from _names(node)
