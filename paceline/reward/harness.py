"""Programs in two sandboxes: one serves a solution, the other runs tests that call it.

Both are started from this source, with a call of `serve` or `run` at its end. Descriptor 0 of each
is one end of a socket, on which they exchange lines of JSON. Only plain data crosses it, so the
tests decide about values that no object, frame or changed function of the solution can forge.
"""

import ast
import builtins
import collections
import importlib
import io
import itertools
import json
import os
import sys
import types
from typing import Any

LONGEST = 2**24  # bytes of a message
LONGEST_ITERATOR = 100_000
SIMPLE = (bool, int, float, str)
GROUPS = (list, tuple, set, frozenset)
# Further kinds of groups: the type, and how it is made of the items.
FURTHER: dict[str, tuple[Any, Any]] = {
    "deque": (collections.deque, collections.deque),
    "keys": (type({}.keys()), lambda items: dict.fromkeys(items).keys()),
    "values": (type({}.values()), lambda items: dict(enumerate(items)).values()),
    "items": (type({}.items()), lambda items: dict(items).items()),
}
# They would end a loop of the tests early: `all(map(f, cases))` is True if f raises StopIteration.
ENDS_LOOPS = (StopIteration, StopAsyncIteration)


class Rejected(BaseException):
    """The solution has ended or returned an object. No test can expect that."""


def encode(value: Any) -> Any:
    """Return the value as JSON, its subclasses of built-in types as these. Raises TypeError."""
    if isinstance(value, Remote):
        return {"object": value._remote_number}
    if hasattr(value, "tolist") and not isinstance(value, (*SIMPLE, *GROUPS, dict)):
        value = value.tolist()  # of numpy or torch
    for kind in SIMPLE:
        if isinstance(value, kind):
            return kind(value)
    if value is None:
        return None
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    for group in GROUPS:
        if isinstance(value, group):
            return {group.__name__: [encode(item) for item in value]}
    for name, (further, _) in FURTHER.items():
        if isinstance(value, further):
            return {name: [encode(item) for item in value]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).decode("latin-1")}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if hasattr(value, "__next__"):
        items = list(itertools.islice(value, LONGEST_ITERATOR + 1))
        if len(items) <= LONGEST_ITERATOR:
            return {"iterator": [encode(item) for item in items]}
    raise TypeError(f"{type(value).__name__} is not plain data")


def decode(data: Any, objects: "list[Any] | tuple[()]" = ()) -> Any:
    """Return the value of JSON that `encode` made. Anything else raises an exception."""
    if data is None or type(data) in SIMPLE:
        return data
    ((kind, content),) = data.items()
    match kind:
        case "object":
            return objects[content]
        case "bytes":
            return content.encode("latin-1")
        case "complex":
            return complex(*content)
        case "range":
            return range(*content)
        case "dict":
            return {decode(key, objects): decode(item, objects) for key, item in content}
    items = [decode(item, objects) for item in content]
    if kind == "iterator":
        return iter(items)
    if kind in FURTHER:
        return FURTHER[kind][1](items)
    return next(group for group in GROUPS if group.__name__ == kind)(items)


def take_descriptors() -> tuple[int, int]:
    """Return the socket and the standard output; the code may read and print nothing."""
    channel, output = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(nothing, fd)
    sys.set_int_max_str_digits(0)
    return channel, output


def send(channel: int, message: Any) -> None:
    data = memoryview(json.dumps(message).encode() + b"\n")
    while data:
        data = data[os.write(channel, data) :]


# The process of the solution


def serve(code: str) -> None:
    """Run the solution and answer calls of its functions until the tests end."""
    channel, _ = take_descriptors()
    module = types.ModuleType("solution")
    sys.modules["solution"] = module  # as dataclasses expect
    exec(compile(code, "solution.py", "exec"), vars(module))
    objects: list[Any] = []
    for line in io.BufferedReader(io.FileIO(channel)):
        request = json.loads(line)
        try:
            reply = answer(request, vars(module), objects)
        except BaseException as e:
            reply = {"raised": [kind.__name__ for kind in type(e).__mro__], "text": str(e)}
        send(channel, reply)


def answer(request: dict[str, Any], namespace: dict[str, Any], objects: list[Any]) -> Any:
    if "names" in request:
        found = {name: namespace[name] for name in request["names"] if name in namespace}
        return {"found": {name: described(value, objects) for name, value in found.items()}}
    target = request["target"]
    value = namespace[target] if isinstance(target, str) else objects[target]
    if "assigned" in request:
        setattr(value, request["attribute"], decode(request["assigned"], objects))
        return {}
    if request["attribute"] is not None:
        value = getattr(value, request["attribute"])
    if "args" not in request:
        return described(value, objects)
    given = [*request["args"], *(item for _, item in request["named"])]
    values = [decode(item, objects) for item in given]
    count = len(request["args"])
    named = dict(zip((key for key, _ in request["named"]), values[count:], strict=True))
    result = value(*values[:count], **named)
    if request["keep"] and isinstance(value, type):
        objects.append(result)
        return {"object": len(objects) - 1}
    try:
        reply = {"value": encode(result)}
    except TypeError as e:
        return {"rejected": str(e)}
    return reply | {"changed": [changed(*pair) for pair in zip(values, given, strict=True)]}


def described(value: Any, objects: list[Any]) -> dict[str, Any]:
    if isinstance(value, type) and issubclass(value, Exception):
        return {"exception": [kind.__name__ for kind in value.__mro__[1:]]}
    if callable(value):
        objects.append(value)
        return {"callable": len(objects) - 1}
    try:
        return {"value": encode(value)}
    except TypeError as e:
        return {"rejected": str(e)}


def changed(value: Any, given: Any) -> Any:
    """Return an argument that the solution changed in place; None if it did not."""
    try:
        found = encode(value) if isinstance(value, list | dict | set) else given
    except TypeError:
        return None
    return None if found == given else found


# The process of the tests


class Solution:
    """The other process, as the tests see it."""

    def __init__(self, channel: int) -> None:
        self.calls = 0
        self.rejected = False  # in the test that runs
        self._channel, self._replies = channel, io.BufferedReader(io.FileIO(channel))
        self._exceptions: dict[str, type[Exception]] = {}

    def names(self, names: list[str]) -> dict[str, Any]:
        """Return what the solution defines of the names: functions, classes and values."""
        found: dict[str, Any] = {}
        replies = self._ask({"names": names})["found"]
        # No other names, which could replace functions that the tests use. Bases of exceptions come
        # before the exceptions that are derived from them.
        known = {name: replies.get(name, {"rejected": "not defined"}) for name in names}
        for name, reply in sorted(
            known.items(), key=lambda item: len(item[1].get("exception", ()))
        ):
            if "exception" in reply:
                base = self._exception(reply["exception"]) or Exception
                found[name] = self._exceptions[name] = type(name, (base,), {})
            elif "callable" in reply and name[0].isupper():
                found[name] = RemoteClass(self, reply["callable"])
            elif "rejected" not in reply:
                found[name] = self._value(name, None, reply)
        return found

    def get(self, target: int, attribute: str) -> Any:
        return self._value(target, attribute, self._ask({"target": target, "attribute": attribute}))

    def assign(self, target: int, attribute: str, value: Any) -> None:
        self._ask({"target": target, "attribute": attribute, "assigned": encode(value)})

    def call(
        self,
        target: str | int,
        attribute: str | None,
        args: tuple[Any, ...],
        named: dict[str, Any],
        keep: bool = False,
    ) -> Any:
        self.calls += 1
        reply = self._ask(
            {
                "target": target,
                "attribute": attribute,
                "args": [encode(item) for item in args],
                "named": [[key, encode(item)] for key, item in named.items()],
                "keep": keep,
            }
        )
        if keep and "object" in reply:
            return Remote(self, int(reply["object"]))
        for before, after in zip((*args, *named.values()), reply["changed"], strict=True):
            if after is not None:
                replace(before, decode(after))
        return decode(reply["value"])

    def _value(self, target: str | int, attribute: str | None, reply: dict[str, Any]) -> Any:
        if "callable" in reply:
            return lambda *args, **named: self.call(target, attribute, args, named)
        return decode(reply["value"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        reply = self._exchange(request)
        raised = self._exception(reply["raised"]) if "raised" in reply else None
        if raised is not None:
            raise raised(reply.get("text"))
        if "raised" in reply or "rejected" in reply:
            self.rejected = True
            raise Rejected
        return reply

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            send(self._channel, request)
            line = self._replies.readline(LONGEST)
            reply = json.loads(line) if line.endswith(b"\n") else None
            return reply if isinstance(reply, dict) else {"rejected": "no reply"}
        except (OSError, ValueError, RecursionError):
            return {"rejected": "no reply"}

    def _exception(self, names: list[str]) -> type[Exception] | None:
        """Return the first exception that the tests may get."""
        for name in names:
            kind = self._exceptions.get(name, getattr(builtins, str(name), None))
            if isinstance(kind, type) and issubclass(kind, Exception):
                return RuntimeError if issubclass(kind, ENDS_LOOPS) else kind
        return None


class Remote:
    """An object of the solution. The tests get its attributes and call its methods."""

    __slots__ = ("_remote_number", "_remote_solution")

    def __init__(self, solution: Solution, number: int) -> None:
        object.__setattr__(self, "_remote_solution", solution)
        object.__setattr__(self, "_remote_number", number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._remote_solution.get(self._remote_number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._remote_solution.assign(self._remote_number, name, value)

    def __len__(self) -> int:
        return int(self._remote_solution.call(self._remote_number, "__len__", (), {}))

    def __bool__(self) -> bool:
        for method in ("__bool__", "__len__"):
            try:
                return bool(self._remote_solution.call(self._remote_number, method, (), {}))
            except AttributeError:
                continue
        return True

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._remote_solution.call(self._remote_number, None, args, named)


class RemoteClass(Remote):
    """A class of the solution, or a function whose name begins with a capital letter."""

    __slots__ = ()

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._remote_solution.call(self._remote_number, None, args, named, keep=True)


def replace(value: Any, new: Any) -> None:
    """Give a list, dict or set the content that the solution gave it."""
    if isinstance(value, list):
        value[:] = new
    else:
        value.clear()
        value.update(new)


class CountAsserts(ast.NodeTransformer):
    """Puts a call of `__reached__` before each assertion."""

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        return [ast.Expr(ast.Call(ast.Name("__reached__", ast.Load()), [], [])), node]


def run(tests: list[dict[str, Any]]) -> None:
    """Run the tests, and print the indices of those that pass."""
    channel, output = take_descriptors()
    sys.argv = ["tests"]
    solution = Solution(channel)
    for index, test in enumerate(tests):
        try:
            passed = passes(test, solution)
        except BaseException:
            continue
        if passed:
            os.write(output, f"{index}\n".encode())


def passes(test: dict[str, Any], solution: Solution) -> bool:
    """Run one test. It fails if it never calls the solution or reaches none of its assertions."""
    solution.calls, solution.rejected = 0, False
    reached: list[None] = []
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module  # where unittest looks for tests
    for name, imported in test["modules"].items():
        vars(module)[name] = importlib.import_module(imported)
    names = solution.names(test["names"])
    has_functions = not names or any(map(callable, names.values()))
    vars(module).update(names, __reached__=lambda: reached.append(None))
    tree = ast.parse(test["source"])
    has_asserts = any(isinstance(node, ast.Assert) for node in ast.walk(tree))
    tree = ast.fix_missing_locations(CountAsserts().visit(tree))
    try:
        exec(compile(tree, "test.py", "exec"), vars(module))
    except SystemExit as e:  # of unittest.main()
        if e.code:
            return False
    if not defined_tests_pass(module, with_functions=not solution.calls):
        return False
    used = solution.calls or not has_functions
    return bool(used and not solution.rejected and (reached or not has_asserts))


def defined_tests_pass(module: types.ModuleType, with_functions: bool) -> bool:
    """Run test cases, whose results `unittest.main(exit=False)` ignores, and test functions."""
    functions = [
        value
        for name, value in vars(module).items()
        if name.startswith("test") and isinstance(value, types.FunctionType) and with_functions
    ]
    if "unittest" not in sys.modules and not functions:
        return True
    import unittest  # takes long

    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    suite.addTests(map(unittest.FunctionTestCase, functions))
    return suite.run(unittest.TestResult()).wasSuccessful()
