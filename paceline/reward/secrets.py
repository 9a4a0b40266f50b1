"""Environment variables that look like secrets. Reward processes do not get them."""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

_NAME = re.compile(
    r"(TOKEN|SECRET|KEY|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)S?(_|$)|_(AUTH|PAT|DSN)$"
    r"|^AWS_(?!CA_BUNDLE$|.*REGION$)|^SSH_AUTH_SOCK$",
    re.IGNORECASE,
)
_VALUE = re.compile(r"://[^/\s:@]*:[^/\s@]+@")  # a URL with a password


def secret_names(environment: Mapping[str, str], passed: Iterable[str] = ()) -> list[str]:
    """Return the names of the secrets, without those that match a name or pattern in `passed`."""
    patterns = tuple(passed)
    return sorted(
        name
        for name, value in environment.items()
        if (_NAME.search(name) or _VALUE.search(value))
        and not any(fnmatchcase(name, pattern) for pattern in patterns)
    )
