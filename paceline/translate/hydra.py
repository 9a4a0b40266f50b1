"""verl's command lines: Hydra overrides, alone or in a shell script."""

import ast
import operator
import os
import re
import shlex
from collections.abc import Container, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from paceline.errors import ConfigError
from paceline.translate.source import PROGRAM

OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_]\w*(\.\w+)+=.*|~[A-Za-z_]\w*(\.\w+)*", re.DOTALL)
NOTHING: Mapping[str, Any] = MappingProxyType({})
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?(?:([-=])([^{}]*)|\?[^{}]*))?\})")
BRACES = re.compile(r"\$\{(?:[^{}]|\$\{[^{}]*\})*\}")
ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def flatten(
    values: Mapping[str, Any], prefix: str = "", tables: Container[str] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield dotted names with values.

    A mapping is a section, unless it is empty or the value of a setting in `tables`.
    """
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and name not in tables:
            yield from flatten(value, f"{name}.", tables)
        else:
            yield name, _as_dicts(value)


def _as_dicts(value: Any) -> Any:
    """Return a copy of nested mappings, so that settings do not change those of the caller."""
    if isinstance(value, Mapping):
        return {key: _as_dicts(item) for key, item in value.items()}
    return value


def read_overrides(overrides: Iterable[str], before: Mapping[str, Any] = NOTHING) -> dict[str, Any]:
    """Return the values `before` with those of `a.b=c`, `+a.b=c` and `++a.b=c` by name.

    `~a.b` removes one, or all of a section.
    """
    found = dict(before)
    for override in overrides:
        name, equals, text = override.partition("=")
        if name.startswith("~"):
            gone = name[1:]
            found = {
                key: value
                for key, value in found.items()
                if key != gone and not key.startswith(f"{gone}.")
            }
        elif not equals or not name.strip("+ "):
            raise ConfigError(
                f"{override!r} is not an override; write name=value, for example "
                "data.train_batch_size=64, or give a .yaml or .sh file"
            )
        else:
            found[name.strip("+ ")] = read_value(text)
    return found


def read_value(text: str) -> Any:
    """Return the value of an override: a number, a bool, null, a list or text."""
    import yaml  # most commands do not need it

    try:
        return yaml.safe_load(text) if text.strip() else ""
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


def read_script(text: str, base: Mapping[str, Any] = NOTHING) -> dict[str, Any]:
    """Return `base` with the overrides in a shell script that starts verl, and the program.

    Variables, `$(pwd)` and `$((...))` are replaced. Bash arrays need no special case: their
    elements are overrides too.
    """
    variables: dict[str, str] = {}
    overrides: list[str] = []
    program = ""
    text = text.replace("$(pwd)", os.getcwd())
    # A comment in backquotes, which begins a word: the second one of NOW=`date`  # now does not.
    text = re.sub(r"(?<!\S)`\s*#[^`\n]*`", "", text)
    for line in re.sub(r"\\\s*\n", " ", text).splitlines():
        for word in _words(_computed(line, variables)):
            expanded = _expanded(word, variables)
            if OVERRIDE.fullmatch(word):
                overrides.append(expanded)
            elif match := ASSIGNMENT.fullmatch(word):
                before = variables.get(match[1], "") if match[2] else ""
                variables[match[1]] = before + _expanded(match[3], variables)
            elif re.search(r"\bmain_ppo|fully_async|one_step_off", word):
                program = word
    found = read_overrides(overrides, base)
    return found | ({PROGRAM: program} if program else {})


def _words(line: str) -> list[str]:
    # Spaces in ${NAME:?a message} do not separate words.
    line = BRACES.sub(lambda match: re.sub(r"\s", "\0", match[0]), line)
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # a quote that ends on another line
        words = line.split()
    return [_element(word).replace("\0", " ") for word in words]


def _element(word: str) -> str:
    """Return a word without parentheses of a bash array and a semicolon, which may touch it."""
    word = re.sub(r"^(\w+\+?=)?\(", "", word.removesuffix(";"))
    closes = word.endswith(")") and word.count(")") > word.count("(")  # not those of $(command)
    return word[:-1] if closes else word


def _expanded(word: str, variables: dict[str, str]) -> str:
    """Return a word with the values of its variables. `${NAME:=default}` also sets the variable."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        found = variables.get(name, os.environ.get(name))
        if found is None and match[3] == "=":
            variables[name] = match[4]
        default = match[0] if match[4] is None else match[4]
        return default if found is None else found

    for _ in range(4):  # a default may contain variables: ${DATA:-${HOME}/data}
        word = VARIABLE.sub(value, word)
    return word


def _computed(line: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        try:
            names = {name: int(text) for name, text in variables.items() if text.isdigit()}
            return str(_number(ast.parse(match[1].replace("$", ""), mode="eval").body, names))
        except (SyntaxError, KeyError, ArithmeticError, ValueError, RecursionError, MemoryError):
            return match[0].replace(" ", "")

    return ARITHMETIC.sub(value, line)


def _number(node: ast.expr, names: Mapping[str, int]) -> int:
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _number(node.left, names), _number(node.right, names)
        return int(OPERATORS[type(node.op)](left, right))
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return names[node.id]
    raise KeyError(ast.unparse(node))
