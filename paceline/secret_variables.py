"""Environment variables that look like secrets, by name or value.

Processes of rewards and environments do not get them, and messages and logs do not quote them.
"""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

_NAME = re.compile(
    r"(TOKEN|SECRET|KEY|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)S?\d*(_|$)|_(AUTH|PAT|DSN)$"
    r"|^AWS_(?!CA_BUNDLE$|.*REGION$)|^SSH_AUTH_SOCK$",
    re.IGNORECASE,
)
_VALUE = re.compile(r"://[^/\s:@]*:[^/\s@]+@")  # a URL with a password


def is_secret(name: str, value: str) -> bool:
    return bool(_NAME.search(name) or _VALUE.search(value))


def secret_names(environment: Mapping[str, str], passed: Iterable[str] = ()) -> list[str]:
    """Return the names of the secrets, without those that match a name or pattern in `passed`."""
    patterns = tuple(passed)
    return sorted(
        name
        for name, value in environment.items()
        if is_secret(name, value) and not any(fnmatchcase(name, pattern) for pattern in patterns)
    )


def withheld_hint(problem: str, withheld: Iterable[str], code: str, setting: str) -> str:
    """Return what to do if a problem names a variable that a process did not get."""
    for name in withheld:
        if name in problem:
            return (
                f". {name} is set, but looks like a secret, which {code} do not get; "
                f'to pass it: {setting}=["{name}"]'
            )
    return ""
