"""User code that a setting names: "module:name", "file.py:name", an entry point, or a callable.

Imports only small modules, because reward processes import this module and must start fast.
"""

import difflib
import functools
import importlib
import importlib.util
import inspect
import os
import pickle
import sys
import sysconfig
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from paceline.errors import ConfigError
from paceline.printable import describe_error

# What user code raises if it fails. sys.exit() would end the run with the exit code of a success.
FAILURES = (Exception, SystemExit)
_registry = threading.Lock()  # cloudpickle's list of modules to pickle by value is global


class PluginError(ConfigError):
    """A name without code, or code that cannot be used. Callers add the name of the setting."""


class Plugin:
    """User code and its name, as the value of a setting.

    Two plugins are equal if their names are. JSON has the name alone. Pickling takes the code
    along: a callable as a value, a file as its text, which is used where the file does not exist.
    """

    __slots__ = ("_code", "_name", "_sent")

    def __init__(
        self, name: str, code: Callable[..., Any] | None = None, sent: str | bytes | None = None
    ) -> None:
        """`sent`: what came from another process, the text of the file or the pickled callable."""
        self._name, self._code, self._sent = name, code, sent

    @classmethod
    def of(cls, code: "str | Callable[..., Any] | Plugin") -> "Plugin":
        """Return the plugin that a name or a callable stands for. Nothing is loaded yet."""
        if isinstance(code, Plugin):
            return code
        if isinstance(code, str) and code:
            return cls(code)
        if callable(code):
            return cls(_name_of(code), code)
        raise PluginError(
            f"expected 'file.py:function', 'module:function', an entry point or a function, "
            f"got {code!r}"
        )

    def check(self, group: str, known: Collection[str] = ()) -> None:
        """Raise PluginError if a file or an entry point does not exist. Nothing is imported."""
        origin, colon, _ = self._name.rpartition(":")
        if self._code is None and self._sent is None:
            if not colon:
                _entry_point(self._name, group, known)
            elif origin.endswith(".py"):
                _existing(Path(origin).expanduser())

    def load(self, group: str, known: Collection[str] = ()) -> Callable[..., Any]:
        """Return the code; a name without ":" is an entry point of `group`.

        `known` are the built-in names that an error suggests. Raises PluginError if there is no
        such code or if importing it fails.
        """
        if self._code is None:
            try:
                self._code = self._find(group, known)
            except PluginError:
                raise
            except FAILURES as e:
                raise PluginError(f"importing {self._name!r} raised {describe_error(e)}") from e
        return self._code

    def _find(self, group: str, known: Collection[str]) -> Callable[..., Any]:
        if isinstance(self._sent, bytes):
            return _unpickled(self._name, self._sent)
        if ":" in self._name:
            return find_callable(self._name, self._sent)
        found = _entry_point(self._name, group, known).load()
        if not callable(found):
            raise PluginError(f"entry point {self._name!r} of {group!r} is not a function")
        return found

    def is_same(self, other: "Plugin") -> bool:
        """Return whether both are the same code: two functions of a program may share a name."""
        return self == other and self._code is other._code

    def __str__(self) -> str:
        return self._name

    def __repr__(self) -> str:
        return repr(self._name)  # messages show a setting's value with repr

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plugin) and self._name == other._name

    def __hash__(self) -> int:
        return hash(self._name)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # and not by __reduce__, which pickles the code

    def __reduce__(self) -> tuple[Any, ...]:
        origin, _, _ = self._name.rpartition(":")
        if origin.endswith(".py"):
            file = Path(origin).expanduser()
            text = file.read_text(encoding="utf-8") if file.is_file() else self._sent
            return Plugin, (self._name, None, text)
        if self._sent is None and self._code is not None and ":" in self._name:
            return Plugin, (self._name, None, _pickled(self._name, self._code))
        return Plugin, (self._name, None, self._sent)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(
            cls.of, serialization=core_schema.to_string_ser_schema()
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        return {"type": "string"}


def accepted(function: Callable[..., Any], available: Collection[str]) -> list[str]:
    """Return the names among `available` that a function takes as parameters.

    Raises PluginError if it requires others.
    """
    expected = f"expected only parameters among {', '.join(available)}"
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise PluginError(f"has no readable signature; {expected}") from None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return list(available)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    taken = {parameter.name for parameter in parameters if parameter.kind in by_name}
    for parameter in parameters:
        optional = parameter.default is not parameter.empty
        if not (optional or parameter.kind is parameter.VAR_POSITIONAL) and (
            parameter.name not in taken.intersection(available)
        ):
            raise PluginError(f"has the parameter {parameter.name!r}; {expected}")
    return [name for name in available if name in taken]


def call_by_name(function: Callable[..., Any], available: Mapping[str, Any]) -> Any:
    """Call a function with those of the available values that it has parameters for."""
    return function(**{name: available[name] for name in accepted(function, available)})


def _entry_point(name: str, group: str, known: Collection[str]) -> Any:
    from importlib.metadata import entry_points  # takes 40 ms

    registered = {e.name: e for e in entry_points(group=group)}
    if name in registered:
        return registered[name]
    names = [*known, *registered]
    close = difflib.get_close_matches(name, names, n=1)
    raise PluginError(
        f"{name!r} is neither a built-in name nor an entry point of {group!r}"
        + (f"; did you mean {close[0]!r}?" if close else ".")
        + (f" Known: {', '.join(names)}." if names else "")
        + " Write a custom function as 'file.py:function' or 'module:function'."
    )


def _existing(file: Path) -> Path:
    if not file.is_file():
        raise PluginError(f"no file {str(file)!r} (relative paths start at {os.getcwd()})")
    return file


def _name_of(code: Callable[..., Any]) -> str:
    while isinstance(code, functools.partial):
        code = code.func
    named: Any = code if hasattr(code, "__qualname__") else type(code)
    return f"{named.__module__}:{named.__qualname__}"


def _unpickled(name: str, data: bytes) -> Callable[..., Any]:
    try:
        code: Callable[..., Any] = pickle.loads(data)
        return code
    except Exception as e:
        raise PluginError(
            f"{name!r} cannot be loaded in a worker process ({type(e).__name__}: {e}); "
            "it must not need what exists only in your program"
        ) from e


def _pickled(name: str, code: Callable[..., Any]) -> bytes:
    """Pickle code by value, unless workers can import it from an installed package."""
    import cloudpickle

    with _registry, _by_value(cloudpickle):
        try:
            data: bytes = cloudpickle.dumps(code)
        except Exception as e:
            raise PluginError(
                f"{name!r} cannot be sent to worker processes ({type(e).__name__}: {e}); create "
                "what it needs inside the function, or put it into a file and name it "
                "'file.py:function'"
            ) from e
    return data


@contextmanager
def _by_value(cloudpickle: Any) -> Iterator[None]:
    """Let cloudpickle copy what comes from modules that are not installed."""
    modules = [module for module in list(sys.modules.values()) if not _is_installed(module)]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _is_installed(module: ModuleType) -> bool:
    """Return whether a worker process can import the module without this program's search path."""
    name = getattr(module, "__name__", "")
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or sys.modules.get(name) is not module:
        return True  # built in, or __main__ without a file, which cloudpickle copies anyway
    own = name.partition(".")[0] in ("__main__", "paceline")
    return own or any(file.startswith(path + os.sep) for path in _installed_paths())


@functools.cache
def _installed_paths() -> tuple[str, ...]:
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    paths = {sysconfig.get_path(kind) for kind in kinds}
    paths |= {path for path in sys.path if path.endswith(("site-packages", "dist-packages"))}
    return tuple(paths)


def find_callable(spec: str, text: str | None = None) -> Callable[..., Any]:
    """Return the function or class that "module:name" or "file.py:name" names.

    `text` is the content of the file, for machines that do not have it. Raises PluginError if there
    is no such function, or if importing it ends the program. Other exceptions of the imported code
    pass through.
    """
    origin, _, name = spec.rpartition(":")
    is_file = origin.endswith(".py")
    try:
        module = _load_file(Path(origin).expanduser(), text) if is_file else _load_module(origin)
    except SystemExit as e:
        raise PluginError(
            f"importing {spec!r} raised SystemExit: {e}; put what only the program runs under "
            '`if __name__ == "__main__":`'
        ) from e
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            have = [
                name
                for name, value in vars(module).items()
                if getattr(value, "__module__", None) == module.__name__ and name[0] != "_"
            ]
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


def _load_file(file: Path, text: str | None = None) -> Any:
    if text is None:
        _existing(file)
    sys.path.insert(0, str(file.resolve().parent))  # so that it can import modules next to it
    if text is not None and not file.is_file():
        module = ModuleType(file.stem)
        module.__file__ = str(file)
        sys.modules[file.stem] = module
        exec(compile(text, str(file), "exec"), vars(module))
        return module
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module
