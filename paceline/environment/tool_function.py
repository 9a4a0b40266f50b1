"""A Python function as a tool: its description for the model, and checks of the model's arguments.

Type hints and the docstring are the description. Arguments are converted to the types of the hints:
"7" is an integer where one is expected, and a value of an enum becomes its member.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from enum import Enum
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from paceline.errors import ConfigError

MAX_PROBLEM = 300  # characters of a message about one argument
_JSON = (str, int, float, bool, list, dict, tuple, type(None), Any)


class ArgumentError(Exception):
    """Arguments that the function does not accept. The model gets the message."""


class ToolFunction:
    def __init__(self, function: Callable[..., Any], describe: bool = True) -> None:
        """Raise ConfigError if the function cannot be described to a model.

        Without `describe` there is no schema, which needs transformers.
        """
        self.function = function
        self.name: str = getattr(function, "__name__", type(function).__name__)
        self.is_async = inspect.iscoroutinefunction(function)
        try:
            if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
                raise TypeError("it is a generator; return the whole result instead")
            parameters = inspect.signature(function).parameters
            hints = get_type_hints(function)
            _check(parameters)
            self.schema = _schema(self.name, function, parameters, hints) if describe else {}
            self._types = {name: TypeAdapter(hints[name]) for name in parameters}
        except Exception as error:
            raise ConfigError(
                f"rollout.tools: the function {self.name!r} cannot be described to the model: "
                f"{' '.join(map(str, error.args))}. It needs a type hint for every argument that "
                "JSON can express (numbers, text, bool, list, dict, Literal, Enum, Optional), and "
                "a docstring with a section Args that describes each"
            ) from None
        self._required = {n for n, p in parameters.items() if p.default is p.empty}

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments in the types of the function. Raise ArgumentError."""
        expected = f"expected {', '.join(self._types) or 'no arguments'}"
        if unknown := given.keys() - self._types.keys():
            raise ArgumentError(f"unknown argument {min(unknown)!r:.80}; {expected}")
        if missing := self._required - given.keys():
            raise ArgumentError(f"the argument {min(missing)!r} is missing; {expected}")
        return {name: self._convert(name, value) for name, value in given.items()}

    def _convert(self, name: str, value: Any) -> Any:
        try:
            return self._types[name].validate_python(value)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = "".join(f"[{part!r}]" for part in first["loc"])
            problem = f"argument {name!r}{where}: {first['msg']}, got {value!r:.80}"
            raise ArgumentError(problem[:MAX_PROBLEM]) from None


def _check(parameters: Mapping[str, inspect.Parameter]) -> None:
    for name, parameter in parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"the parameter {str(parameter)!r} has no name for the model to use")
        if name == "self" and parameter.annotation is parameter.empty:
            raise TypeError("it is a method without its object; use a bound method or a function")


def _schema(
    name: str,
    function: Callable[..., Any],
    parameters: Mapping[str, inspect.Parameter],
    hints: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the description in the form that chat templates expect."""
    from transformers.utils import get_json_schema

    def described() -> None: ...

    described.__name__, described.__doc__ = name, inspect.getdoc(function)
    described.__annotations__ = {n: _plain(hints[n]) for n in parameters if n in hints}
    described.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    schema: dict[str, Any] = get_json_schema(described)
    schema["function"]["name"] = name
    properties = schema["function"]["parameters"]["properties"]
    for parameter in parameters.values():
        if parameter.default not in (parameter.empty, None):
            default = parameter.default
            default = default.value if isinstance(default, Enum) else default
            properties[parameter.name]["default"] = json.loads(json.dumps(default))
    return schema


def _plain(hint: Any) -> Any:
    """Replace enums by their values, which is how JSON writes them."""
    if isinstance(hint, type) and issubclass(hint, Enum):
        return Literal[tuple(member.value for member in hint)]
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return Union[tuple(map(_plain, inner))]  # noqa: UP007 - the members are not known here
    if origin in (list, dict, tuple) and inner:
        return origin[tuple(map(_plain, inner))]
    if origin is None and hint not in _JSON:
        raise TypeError(f"JSON cannot express the type {getattr(hint, '__qualname__', hint)!r}")
    return hint
