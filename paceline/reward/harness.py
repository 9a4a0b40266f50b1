"""Program in the sandbox that runs a solution and its tests. It is started from its source.

It reads {"nonce", "code", "tests"} as JSON and writes a line "nonce {test, values}" for each test
that ends without an exception. `values` are what the test compares with; the expected values stay
outside, so the solution cannot know them.
"""

import json
import os
import sys
from typing import Any

LONGEST = 20_000  # characters of a value
PLAIN = (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, type(None))


def plain(value: Any) -> Any:
    """Return the value with built-in types instead of their subclasses and numbers of numpy."""
    if hasattr(value, "tolist") and not isinstance(value, PLAIN):
        value = value.tolist()
    kind = next((kind for kind in PLAIN if isinstance(value, kind)), None)
    if kind is dict:
        return {plain(key): plain(item) for key, item in value.items()}
    if kind in (list, tuple, set, frozenset):
        # frozenset has no literal, and equals a set
        return (set if kind is frozenset else kind)(plain(item) for item in value)
    return value if kind in (None, bool, type(None)) else kind(value)


def main() -> None:
    given = json.loads(sys.stdin.read())
    nonce, report = given.pop("nonce"), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):  # the solution may read and print
        os.dup2(nothing, fd)
    namespace: dict[str, Any] = {"__name__": "solution"}
    exec(compile(given["code"], "solution.py", "exec"), namespace)
    for index, test in enumerate(given["tests"]):
        values: list[str] = []

        def check(value: Any, values: list[str] = values) -> None:
            values.append(repr(plain(value))[:LONGEST])

        try:
            exec(compile(test, "test.py", "exec"), namespace | {"__check__": check})
        except BaseException:
            continue
        line = json.dumps({"test": index, "values": values})
        os.write(report, f"{nonce} {line}\n".encode())


if __name__ == "__main__":
    try:
        main()
    finally:
        os._exit(0)  # without the threads and exit handlers of the solution
