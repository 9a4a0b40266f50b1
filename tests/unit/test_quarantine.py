"""Quarantine: which prompts are suspected, which must be alone, and what a resumed run reads."""

from pathlib import Path

import pytest

from paceline.rollout.quarantine import Quarantine, Quarantined


def test_prompt_is_quarantined_after_third_death() -> None:
    quarantine = Quarantine()
    for _ in range(3):
        quarantine.check("a")
        quarantine.suspect("a", "rollout")
    with pytest.raises(Quarantined, match="prompt a is quarantined: it was on 3 engines that died"):
        quarantine.check("a")
    quarantine.check("b")


def test_completed_prompt_is_no_longer_suspected(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path / "q")
    for _ in range(2):
        quarantine.suspect("a", "rollout")
        quarantine.suspect("b", "rollout")
    quarantine.clear("a")
    reopened = Quarantine(tmp_path / "q")
    for uid in "ab":
        reopened.suspect(uid, "rollout")
    reopened.check("a")
    with pytest.raises(Quarantined):
        reopened.check("b")


def test_prompts_that_were_on_two_dead_engines_take_turns() -> None:
    quarantine, one, other = Quarantine(), object(), object()
    quarantine.suspect("b", "rollout")
    assert quarantine.may_start("b", other), "one death is no reason to wait"
    for uid in "ab":
        quarantine.suspect(uid, "rollout")
        quarantine.suspect(uid, "rollout")
    assert quarantine.may_start("a", one) and quarantine.may_start("a", one)
    assert not quarantine.may_start("b", other) and not quarantine.end_turn(other)
    assert quarantine.may_start("c", object()), "other prompts do not wait"
    assert quarantine.end_turn(one) and quarantine.may_start("b", other)


@pytest.mark.parametrize(
    "damage", [b"\xff\xfe{", b"[1]", b'{"uid": 3, "deaths": 1}', b"[" * 100_000, b'{"uid": "x"}']
)
def test_damaged_lines_are_ignored(damage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "q"
    path.write_bytes(b'{"uid": "a", "deaths": 3}\n' + damage + b"\n")
    with pytest.raises(Quarantined):
        Quarantine(path).check("a")
