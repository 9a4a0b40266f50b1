"""Environment variables that look like secrets, by name or value.

Reward processes do not get them, and messages and logs do not quote them.
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
