"""The audit agrees with the real loop: hundreds of histories, and some with a planted error."""

import random
from pathlib import Path

import pytest

from paceline.auditor.history import History, Limits
from paceline.auditor.report import AuditReport
from paceline.errors import RewardError
from paceline.line_file import read_lines
from paceline.queue.admission import Admission
from paceline.queue.ledger import Ledger, LedgerState
from paceline.types import Prompt
from tests.fakes import World
from tests.torture.test_loop import MODES, random_world, return_tickets_early
from tests.virtual import run_virtual


def audited(path: Path, world: World) -> History:
    limits = Limits(world.groups_per_step, world.schedule.max_staleness)
    history = History(limits, AuditReport(path))
    for line in read_lines(path):
        history.read(line, set())
    return history


def play(path: Path, mode: str, seed: int) -> World:
    """Run with failures and a small queue, in up to three sessions; return the last world."""
    numbers = random.Random(seed)
    bad = set(numbers.sample(range(60), 8)) if seed % 3 == 0 else set()

    def score(prompt: Prompt) -> list[float] | None:
        if prompt.tokens[0] in bad:
            raise RewardError("planted")
        return None

    state: LedgerState | None = None
    steps, groups_per_step = 0, numbers.randint(1, 4)
    for session in range(1 + seed % 3):
        world = random_world(seed + 1000 * session, MODES[mode])
        world.score, world.max_failed_groups = score, 100
        world.groups_per_step = groups_per_step
        if seed % 2:
            world.max_queue_size = groups_per_step + seed % 3
        first, steps = steps, steps + numbers.randint(1, 6)
        world.steps = steps
        ledger = Ledger(path, state)
        loop = world.build(ledger)
        for engine in world.engines:
            engine.version = first
        run_virtual(loop.run(first))
        state = ledger.state()
        ledger.close()
    return world


@pytest.mark.parametrize("mode", MODES)
def test_audit_finds_nothing_in_history_of_real_loop(mode: str, tmp_path: Path) -> None:
    reissued = dropped = 0
    for seed in range(40):
        path = tmp_path / f"{seed}.jsonl"
        world = play(path, mode, seed)
        history = audited(path, world)
        assert history.report.ok, f"seed {seed}: {history.report.problems[:3]}"
        counts = history.counts()
        assert counts.trained == world.steps * world.groups_per_step
        assert counts.outstanding == tuple(world.ledger.outstanding)
        assert counts.dropped == dict(world.ledger.dropped)
        reissued += path.read_text().count('"reissued"')
        dropped += sum(counts.dropped.values())
    assert dropped and (reissued or mode == "sync")


def test_audit_finds_tickets_that_return_before_weights_are_live(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    return_tickets_early(monkeypatch)
    found = 0
    for seed in range(20):
        path = tmp_path / f"{seed}.jsonl"
        world = random_world(seed, MODES["async swap"])
        ledger = Ledger(path)
        run_virtual(world.build(ledger).run())
        ledger.close()
        found += not audited(path, world).report.ok
    assert found


def test_audit_finds_groups_that_overtake_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def newest(self: Admission, count: int) -> list[int]:
        return list(self._coming)[-count:]

    monkeypatch.setattr(Admission, "oldest", newest)
    world = random_world(1, MODES["async swap"])
    ledger = Ledger(tmp_path / "ledger.jsonl")
    run_virtual(world.build(ledger).run())
    ledger.close()
    checks = {p.check for p in audited(tmp_path / "ledger.jsonl", world).report.problems}
    assert "order" in checks
