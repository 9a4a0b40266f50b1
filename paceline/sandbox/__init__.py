"""Runs Python that a model wrote, for rewards and tools.

    result = paceline.sandbox.run(code, timeout_s=5)
    if result.ok:
        print(result.stdout)

Imports only the standard library, because reward processes import it and must start fast.
"""

from paceline.sandbox.runner import ALLOW_WEAK, check, run
from paceline.sandbox.supervisor import Result

__all__ = ["ALLOW_WEAK", "Result", "check", "run"]
