"""Custom reward functions: how they are checked and called, and which results are rewards.

Imports only the standard library and small modules, because reward processes import this module and
must start fast.
"""

import functools
import inspect
import math
import numbers
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from paceline.errors import frames_of
from paceline.printable import describe_error

LARGEST = 3.4e38  # rewards are kept as float32
MAX_SHOWN = 200  # characters of a value or of an exception
NOT_APPLICABLE = math.nan  # the score of a function that returned None, where that is allowed


class RewardFunctionError(Exception):
    """A reward function that cannot be used, raised an exception or returned no valid reward."""


# Parameter name that identifies the library a reward was written for, and the call that adapts it.
OTHER_LIBRARIES = {
    "completions": ("TRL", "return {name}(completions=[completion], **row)[0]"),
    "solution_str": (
        "verl",
        'return {name}(row["data_source"], completion, row["reward_model"]["ground_truth"], '
        'row.get("extra_info"))',
    ),
}


def function_name(function: Any) -> str:
    """Return the short name of a function, a callable object or a "file.py:name" spec."""
    if isinstance(function, str):
        return function.rpartition(":")[2]
    if isinstance(function, functools.partial):
        return function_name(function.func)
    name = getattr(function, "__name__", None) or type(function).__name__
    return str(name).strip("<>")  # <lambda>


def check_function(function: Callable[..., Any], name: str) -> None:
    """Raise RewardFunctionError for a function or class that cannot score (completion, row)."""
    try:
        signature = inspect.signature(function.__call__ if inspect.isclass(function) else function)
        wanted_by, how = next(
            (
                OTHER_LIBRARIES[parameter]
                for parameter in signature.parameters
                if parameter in OTHER_LIBRARIES
            ),
            ("", ""),
        )
        if wanted_by:
            how = f"def reward(completion, row): {how.format(name=name)}"
            raise RewardFunctionError(
                f"{name}{signature} is written for {wanted_by}; "
                f"Paceline calls reward(completion, row). Wrap it: {how}"
            )
        signature.bind(*([None] if inspect.isclass(function) else []), "", {})
    except TypeError as e:
        raise RewardFunctionError(
            f"{name}{signature} cannot be called as reward(completion, row), "
            f"where row is the dataset row as a dict: {e}"
        ) from e
    except ValueError:
        pass  # some built-in functions have no signature
    if inspect.isgeneratorfunction(function):
        raise RewardFunctionError(
            f"{name!r} is a generator; expected a function that returns a number"
        )


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether calls of a function, of an object or of instances of a class are awaited."""
    called = function if inspect.isclass(function) else type(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called.__call__)


def instance(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an instance of a class; anything else as it is."""
    return function() if isinstance(function, type) else function


def as_reward(value: Any) -> float | dict[str, float]:
    """Return the value as a finite float, or as a dict of them that has a "reward".

    Raises RewardFunctionError.
    """
    if isinstance(value, Mapping):
        named = {str(name): item for name, item in value.items()}
        if "reward" not in named and "score" in named:
            named["reward"] = named.pop("score")  # the name that verl has for it
        if "reward" not in named:
            raise RewardFunctionError(
                f"returned {_short(value)}; a dict needs a 'reward' (other numbers are recorded)"
            )
        return {
            name: _number(item)
            for name, item in named.items()
            if name == "reward" or _is_number(item)
        }
    return _number(value)


def named_rewards(value: Any) -> dict[str, float]:
    """Return a reward as a new dict with "reward". Raises RewardFunctionError."""
    reward = as_reward(value)
    return dict(reward) if isinstance(reward, Mapping) else {"reward": reward}


def as_optional_reward(value: Any) -> float | dict[str, float] | None:
    return None if value is None else as_reward(value)


def as_score(reward: float | dict[str, float] | None, optional: bool) -> float | dict[str, float]:
    """Return NOT_APPLICABLE for None if that is allowed, else raise RewardFunctionError for it."""
    if reward is None:
        return NOT_APPLICABLE if optional else as_reward(None)
    return reward


def call(
    function: Callable[..., Any],
    completion: str,
    row: Mapping[str, Any],
    run: Callable[[Any], Any] | None = None,
) -> float | dict[str, float] | None:
    """Call the function and return its reward; `run` awaits a coroutine that it returns.

    Raises RewardFunctionError with the function's exception and the line that raised it.
    """
    with explained(function):
        value = function(completion, row)
        if run is not None and inspect.iscoroutine(value):
            value = run(value)
    return as_optional_reward(value)


async def call_async(
    function: Callable[..., Awaitable[Any]],
    completion: str,
    row: Mapping[str, Any],
    timeout_s: float,
) -> float | dict[str, float] | None:
    """Await the function and return its reward.

    Raises RewardFunctionError as `call` does, and TimeoutError if it takes longer than allowed.
    """
    import asyncio  # imported only for async functions, because it is slow

    async with asyncio.timeout(timeout_s):
        with explained(function, but=(asyncio.CancelledError, GeneratorExit)):
            value = await function(completion, row)
    return as_optional_reward(value)


@contextmanager
def explained(
    function: Callable[..., Any], but: tuple[type[BaseException], ...] = ()
) -> Iterator[None]:
    """Turn an exception of the function into a RewardFunctionError that names the line.

    This includes exceptions that are no `Exception`, such as SystemExit, KeyboardInterrupt or a
    panic of a Rust library. They would end the thread, and the call would seem to hang.
    """
    try:
        yield
    except but:
        raise
    except BaseException as e:
        what = describe_error(e, MAX_SHOWN)
        raise RewardFunctionError(f"raised {what}{_line(e, function)}") from e


def make_instance(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return an instance of a class; anything else as it is. Raises RewardFunctionError."""
    try:
        made = instance(function)
    except Exception as e:
        raise RewardFunctionError(
            f"{name}() raised {describe_error(e, MAX_SHOWN)}{_line(e, function)}; expected a "
            "function, or a class without arguments. If the class needs some, pass an instance"
        ) from e
    if not callable(made):
        raise RewardFunctionError(
            f"{name} has no method __call__; expected a function of (completion, row), or an "
            "instance of a class with async methods score and close"
        )
    return made


def explain_import(error: BaseException) -> str:
    """Describe an exception that importing a file or making an instance of its class raised."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = [f for f in frames if not f.filename.startswith("<")][-1]
    where, what = f"{frame.filename}:{frame.lineno}", describe_error(error, MAX_SHOWN)
    if isinstance(error, SyntaxError):
        where, what = f"{error.filename}:{error.lineno}", f"{type(error).__name__}: {error.msg}"
    return f"importing it raised {what} ({where})"


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) or getattr(value, "ndim", None) == 0


def _number(value: Any) -> float:
    if not isinstance(value, numbers.Real) and getattr(value, "ndim", None) == 0:
        value = value.item()  # a scalar of numpy or torch
    if not isinstance(value, numbers.Real):
        raise RewardFunctionError(
            f"returned {_short(value)} ({type(value).__name__}); expected a number"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= LARGEST:
        raise RewardFunctionError(
            f"returned {_short(value)} ({type(value).__name__}); expected a finite number "
            f"of at most {LARGEST:g}"
        )
    return number


def _line(error: BaseException, function: Callable[..., Any]) -> str:
    """Return the location of the error: the last line in the user's file, else the last line."""
    frames = [f for f in frames_of(error) if f.filename != __file__]
    code = getattr(inspect.unwrap(function), "__code__", None)
    own = [f for f in frames if code is not None and f.filename == code.co_filename]
    frame = (own or frames)[-1:]
    return "".join(f" ({f.filename}:{f.lineno})" for f in frame)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
