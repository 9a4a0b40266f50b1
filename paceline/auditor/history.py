"""The history of every prompt, from the lines of ledger.jsonl.

A resumed run issues the prompts that were outstanding again, in their order, before new ones. So a
`reissued` line starts a session, and the order of admission counts from there.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from paceline.auditor.report import AuditReport
from paceline.line_file import Line

FILE = "ledger.jsonl"
MOST_NAMED = 20  # of missing prompts


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings that the history must respect; None if settings.json does not tell."""

    groups_per_step: int | None
    max_staleness: int | None

    @property
    def in_flight(self) -> int | None:
        if self.groups_per_step is None or self.max_staleness is None:
            return None
        return (self.max_staleness + 1) * self.groups_per_step


def read_limits(config: dict[str, Any]) -> Limits:
    per_step = config.get("groups_per_step")
    bound = section(config, "schedule").get("max_staleness")
    return Limits(
        per_step if isinstance(per_step, int) else None, bound if isinstance(bound, int) else None
    )


def section(table: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a table in a table; an empty one if there is none."""
    found = table.get(name)
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class Trained:
    seq: int
    uid: str
    staleness: int


@dataclass(frozen=True, slots=True)
class Counts:
    """The state of the ledger after a line, as checkpoints and the summary record it."""

    issued: int
    outstanding: tuple[int, ...]
    trained: int
    dropped: dict[str, int]


@dataclass
class History:
    limits: Limits
    report: AuditReport
    steps: dict[int, list[Trained]] = field(default_factory=dict)  # the first one is 0
    settled: dict[int, str] = field(default_factory=dict)  # how each prompt ended
    dropped: Counter[str] = field(default_factory=Counter)
    issued: int = 0
    at: dict[int, Counts] = field(default_factory=dict)  # by length of the file in bytes
    next_event: dict[int, str] = field(default_factory=dict)  # after that length
    _outstanding: dict[int, None] = field(default_factory=dict)
    # In order of admission in this session, with the number of steps that were trained before.
    _admitted: dict[int, int] = field(default_factory=dict)
    _to_reissue: list[int] = field(default_factory=list)
    _step: int = -1  # the last one
    _session_step: int = -1  # the last one when the session started
    _end: int = 0  # bytes that were read
    _overtaken: set[int] = field(default_factory=set)
    _where: str = FILE

    def counts(self) -> Counts:
        trained = sum(map(len, self.steps.values()))
        return Counts(self.issued, tuple(self._outstanding), trained, dict(self.dropped))

    def read(self, line: Line, keep: set[int]) -> None:
        """Add a line. The counts after it are kept if the file has one of these lengths."""
        self._where = f"{FILE}:{line.number}"
        if line.row is not None:
            self._event(line.row)
            if self._end in keep:
                self.next_event[self._end] = str(line.row.get("event"))
        self._end = line.end
        if line.end in keep:
            self.at[line.end] = self.counts()

    def _event(self, row: dict[str, Any]) -> None:
        seq, event = row.get("seq"), row.get("event")
        if not isinstance(seq, int) or event not in ("issued", "reissued", "trained", "dropped"):
            self.report.add("files", self._where, f"is not an event of a prompt: {row!r:.120}")
        elif event == "issued":
            self._issue(seq)
        elif event == "reissued":
            self._reissue(seq)
        else:
            self._settle(seq, event, row)

    def _issue(self, seq: int) -> None:
        if seq < self.issued:
            self.report.add("prompts", self._where, f"prompt {seq} is issued a second time")
            return
        for missing in range(self.issued, min(seq, self.issued + MOST_NAMED)):
            what = f"prompt {missing} is missing: {seq} is issued before it"
            self.report.add("prompts", self._where, what)
        self._lost(self._to_reissue)
        self._to_reissue = []
        self.issued = seq + 1
        self._outstanding[seq] = None
        self._admit(seq)

    def _reissue(self, seq: int) -> None:
        if self._to_reissue[:1] != [seq] and self._step > self._session_step:
            # A new session, since a run resumes from a checkpoint, which follows a step.
            self._to_reissue, self._admitted = list(self._outstanding), {}
            self._session_step = self._step
        if seq not in self._to_reissue:
            state = self.settled.get(seq, "in flight" if seq in self._outstanding else "unknown")
            problem = f"prompt {seq} is issued again, but it is {state}"
            self.report.add("prompts", self._where, problem)
            return
        index = self._to_reissue.index(seq)
        self._lost(self._to_reissue[:index])
        del self._to_reissue[: index + 1]
        self._admit(seq)

    def _lost(self, seqs: list[int]) -> None:
        for seq in seqs:
            what = f"prompt {seq} was outstanding at the restart and is not issued again"
            self.report.add("prompts", self._where, what)

    def _admit(self, seq: int) -> None:
        self._admitted[seq] = self._step + 1
        limit = self.limits.in_flight
        if limit is not None and len(self._admitted) > limit:
            problem = f"{len(self._admitted)} prompts are in flight; at most {limit} may be"
            self.report.add("staleness", self._where, problem)

    def _settle(self, seq: int, event: str, row: dict[str, Any]) -> None:
        if seq in self.settled:
            what = f"prompt {seq} is {event}, but it was {self.settled[seq]} before"
            self.report.add("prompts", self._where, what)
            return
        if seq not in self._admitted:
            what = f"prompt {seq} is {event}, but it was not issued in this session"
            self.report.add("prompts", self._where, what)
        if event == "trained":
            self._train(seq, row)
            self.settled[seq] = f"trained in step {self._step + 1}"
        else:
            reason = str(row.get("reason"))
            self.dropped[reason] += 1
            self.settled[seq] = f"dropped ({reason})"
        self._outstanding.pop(seq, None)
        self._admitted.pop(seq, None)

    def _train(self, seq: int, row: dict[str, Any]) -> None:
        step, staleness = row.get("step"), row.get("staleness")
        if not isinstance(step, int) or not isinstance(staleness, int):
            self.report.add("files", self._where, f"is not an event of a prompt: {row!r:.120}")
            return
        if step != self._step:
            self._begin_step(step)
        self.steps[step].append(Trained(seq, str(row.get("uid")), staleness))
        self._check_staleness(seq, step, staleness)
        for earlier in self._admitted:
            if earlier == seq:
                break
            if earlier not in self._overtaken:
                self._overtaken.add(earlier)
                problem = f"prompt {seq} is trained, but {earlier} precedes it and has not ended"
                self.report.add("order", self._where, problem)

    def _check_staleness(self, seq: int, step: int, staleness: int) -> None:
        bound = self.limits.max_staleness
        if staleness < 0 or staleness > step or (bound is not None and staleness > bound):
            limit = f"0 to {step if bound is None else min(step, bound)}"
            problem = f"prompt {seq} has staleness {staleness} in step {step + 1}; expected {limit}"
            self.report.add("staleness", self._where, problem)
        # Independent of the recorded staleness: no prompt waits for more steps than the bound.
        waited = step - self._admitted.get(seq, step)
        if bound is not None and waited > bound:
            problem = f"prompt {seq} waited for {waited} steps; schedule.max_staleness={bound}"
            self.report.add("staleness", self._where, problem)

    def _begin_step(self, step: int) -> None:
        if step != self._step + 1:
            problem = f"step {step + 1} follows step {self._step + 1}"
            self.report.add("order", self._where, problem)
        if self.steps:
            self.check_batch(self._step)
        self.steps.setdefault(step, [])
        self._step = step

    def check_batch(self, step: int) -> None:
        """Report a step that was not trained with groups_per_step prompts."""
        wanted, found = self.limits.groups_per_step, len(self.steps[step])
        if wanted is not None and found != wanted:
            problem = f"step {step + 1} has {found} trained prompts; groups_per_step={wanted}"
            self.report.add("order", FILE, problem)
