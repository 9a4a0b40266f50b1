"""Mark for tests that need bubblewrap. `.ci/run` installs it where it may."""

import pytest

from paceline import sandbox
from paceline.errors import ConfigError


def _missing() -> str:
    try:
        sandbox.check(allow_weak=False)
    except ConfigError as e:
        return str(e)
    return ""


needs_bubblewrap = pytest.mark.skipif(bool(problem := _missing()), reason=problem or "it works")
