"""Lookup of user code by "module:name" or "file.py:name": rewards, curricula and agent loops.

Imports only the standard library, because reward processes import this module and must start fast.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class PluginError(Exception):
    """A spec that names no callable. Callers add the name of the setting to the message."""


def find_callable(spec: str) -> Callable[..., Any]:
    """Return the function or class that "module:name" or "file.py:name" names.

    Raises PluginError if there is none. Exceptions of the imported code itself pass through.
    """
    origin, _, name = spec.rpartition(":")
    is_file = origin.endswith(".py")
    module = _load_file(Path(origin).expanduser()) if is_file else _load_module(origin)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            have = [n for n, f in vars(module).items() if callable(f) and not n.startswith("_")]
            raise PluginError(
                f"no {name!r} in {module.__file__}; it defines {', '.join(have) or 'no functions'}"
            )
        found = getattr(found, part)
    if not callable(found):
        raise PluginError(
            f"{name!r} in {module.__file__} is {type(found).__name__}, not a function"
        )
    return found


def _load_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name is None or not (name == e.name or name.startswith(e.name + ".")):
            raise  # the module exists, but something it imports does not
        path = ", ".join(p or os.getcwd() for p in sys.path)
        raise PluginError(f"no module {name!r}; searched {path}") from e


def _load_file(file: Path) -> Any:
    if not file.is_file():
        raise PluginError(f"no file {str(file)!r} (relative paths start at {os.getcwd()})")
    sys.path.insert(0, str(file.resolve().parent))  # so that it can import modules next to it
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module
