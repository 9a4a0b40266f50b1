"""Distributions of completion lengths, and of seconds: fixed, lognormal, or measured values."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError
from paceline.line_file import intact_rows

TABLE = 65_521  # values that are sampled once; a prime, so that seeds spread over all of them
FORMS = "fixed:LENGTH, lognormal:MEDIAN,SIGMA, list:LENGTH,LENGTH,…, a file or a run directory"


class Distribution:
    """Values by seed: the same seed has the same value in every mode."""

    def __init__(self, name: str, values: "NDArray[np.float64] | Sequence[float]") -> None:
        self.name = name
        self._values = np.asarray(values, np.float64)

    def __getitem__(self, seed: int) -> float:
        return float(self._values[seed % len(self._values)])

    @property
    def mean(self) -> float:
        return float(self._values.mean())

    @property
    def mean_square(self) -> float:
        return float((self._values**2).mean())

    def tokens(self, limit: int) -> "Distribution":
        """Return it as whole numbers from 1 to `limit`."""
        return Distribution(self.name, np.clip(np.rint(self._values), 1, limit))


def read_distribution(text: str, option: str = "--lengths") -> Distribution:
    """Read a distribution: FORMS lists what it may be."""
    kind, separator, values = text.partition(":")
    if separator and kind in ("fixed", "lognormal", "list"):
        return _named(text, kind, values, option)
    return _measured(Path(text), option)


def _named(text: str, kind: str, values: str, option: str) -> Distribution:
    try:
        numbers = [float(value) for value in values.split(",")]
    except ValueError:
        numbers = []
    wanted = {"fixed": 1, "lognormal": 2}.get(kind, len(numbers) or 1)
    if len(numbers) != wanted or not all(math.isfinite(n) and n >= 0 for n in numbers):
        raise ConfigError(f"{option} {text}: expected {FORMS}")
    if kind != "lognormal":
        return Distribution(text, numbers)
    if numbers[0] == 0:
        raise ConfigError(f"{option} {text}: the median is 0; expected a number above 0")
    normal = np.random.default_rng(0).standard_normal(TABLE)
    return Distribution(text, numbers[0] * np.exp(numbers[1] * normal))


def _measured(path: Path, option: str) -> Distribution:
    """Read lengths from samples.jsonl of a run, or from a text file with a number per line."""
    path = path / "samples.jsonl" if path.is_dir() else path
    try:
        found = _samples(path) if path.suffix == ".jsonl" else _numbers(path)
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}; expected {FORMS}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{option} {path}: {error!r}; expected samples.jsonl of a run, or a text file with a "
            "number per line"
        ) from None
    if not found or not all(math.isfinite(n) and n >= 0 for n in found):
        raise ConfigError(
            f"{option} {path}: no lengths, or one that is not a number of at least 0; a run saves "
            "lengths if save_samples is above 0"
        )
    return Distribution(f"{len(found)} lengths of {path}", found)


def _samples(path: Path) -> list[float]:
    path.open("rb").close()  # a file that is not there is an error here
    return [float(sample["tokens"]) for row in intact_rows(path) for sample in row["completions"]]


def _numbers(path: Path) -> list[float]:
    return [float(word) for word in path.read_text(encoding="utf-8").split()]
