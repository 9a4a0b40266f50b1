"""Algorithm settings that contradict each other, with the reason."""

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from paceline.plugins import Plugin

if TYPE_CHECKING:
    from paceline.algo.settings import AlgorithmSettings

Conflict = tuple[bool, str, str, str]  # whether it exists, both settings, the reason


def check_conflicts(settings: "AlgorithmSettings") -> None:
    """Raise ValueError for the first conflict."""
    rules = (_of_correction, _of_normalization, _of_kl, _without_rewards)
    for exists, one, other, reason in chain.from_iterable(rule(settings) for rule in rules):
        if exists:
            raise ValueError(
                f"{one} = {getattr(settings, one)!r} contradicts "
                f"{other} = {getattr(settings, other)!r}: {reason}"
            )


def check_ranges(settings: "AlgorithmSettings") -> None:
    """Raise ValueError for bounds in the wrong order."""
    for name in ("correction_range", "reject_range", "sapo_temperatures"):
        bounds = getattr(settings, name)
        if bounds is not None and not 0 <= bounds[0] <= bounds[1]:
            raise ValueError(f"{name} = {bounds}: expected two numbers, 0 <= first <= second")
    temperatures = settings.sapo_temperatures
    if temperatures[0] == 0:
        raise ValueError(f"sapo_temperatures = {temperatures}: expected numbers above 0")


def _of_correction(s: "AlgorithmSettings") -> Iterator[Conflict]:
    for name, is_set in (
        ("correction", s.correction != "none"),
        ("reject_range", s.reject_range is not None),
    ):
        yield (
            is_set and s.proximal == "behavior",
            *(name, "proximal"),
            "the weight proximal / sampler would be 1 for every token",
        )
    yield (
        s.corrects_whole_batch and s.proximal == "interpolated",
        *("correction", "proximal"),
        "this correction needs proximal = 'recomputed'",
    )
    yield (
        s.correction in ("icepop", "m2po") and s.correction_level != "token",
        *("correction", "correction_level"),
        f"{s.correction} masks tokens",
    )


def _of_normalization(s: "AlgorithmSettings") -> Iterator[Conflict]:
    by_group, settings = s.normalize == "group", ("normalize", "advantage")
    yield (
        by_group and s.advantage in ("gae", "return", "none"),
        *settings,
        "this advantage differs between tokens of a completion",
    )
    yield (
        by_group and s.advantage == "greedy",
        *settings,
        "a group of equal rewards has standard deviation 0 but nonzero advantages",
    )
    yield (
        by_group and isinstance(s.advantage, Plugin),
        *settings,
        "a custom advantage is used as it is; use normalize = 'none' or 'batch'",
    )


def _of_kl(s: "AlgorithmSettings") -> Iterator[Conflict]:
    yield (
        s.kl_target is not None and s.kl_coef == 0,
        *("kl_target", "kl_coef"),
        "adaptation multiplies the coefficient, so it must start above 0",
    )
    yield (
        s.teacher is not None and s.kl_coef == 0,
        *("teacher", "kl_coef"),
        "nothing would use the teacher; set name = 'distill' or kl_coef above 0",
    )
    yield (
        s.kl_placement == "advantage" and s.kl_estimator != "k1",
        *("kl_estimator", "kl_placement"),
        "as an advantage, only k1 has the gradient of the KL",
    )


def _without_rewards(s: "AlgorithmSettings") -> Iterator[Conflict]:
    if s.uses_rewards:
        return
    yield (
        not (s.kl_coef and s.kl_placement == "advantage"),
        *("advantage", "kl_placement" if s.kl_coef else "kl_coef"),
        "every advantage would be 0; set name = 'distill' or another advantage",
    )
    yield (
        s.dynamic_sampling,
        *("dynamic_sampling", "advantage"),
        "groups of equal rewards are as useful as others",
    )
    yield (
        s.overlong == "penalty",
        *("overlong", "advantage"),
        "the penalty changes a reward that is not used",
    )
    yield (
        s.kl_target is not None,
        *("kl_target", "advantage"),
        "the KL is minimized, not kept at a target",
    )
