"""Busy fraction of the engines during the latest steps, from their reports.

Reports come about once a second, in any phase of a step. In a synchronous run, the engines can work
only while the trainer waits for them, so what they did since a report follows from the phases of
the steps. Without this, a report in mid-step would count generation but not the idle time after it.
"""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Report:
    age_s: float  # of the engines
    busy_s: float  # since their start


@dataclass(frozen=True, slots=True)
class Phases:
    """A step: the engines may work for `generating_s` from its start and then stay idle."""

    start: float
    generating_s: float
    end: float

    def generated_s(self, time: float) -> float:
        """Return how long the engines have worked in this step at a time."""
        return min(max(0.0, time - self.start), self.generating_s)


class RolloutBusy:
    def __init__(self, started: float, synchronous: bool) -> None:
        self._synchronous = synchronous
        self._reports: deque[Report] = deque()
        self._steps: deque[Phases] = deque()
        self._engine_start = self._step_end = started

    def add_report(self, busy_s: float, age_s: float, now: float) -> None:
        """Add the means over all engines. A report that is already known is ignored."""
        last = self._reports[-1] if self._reports else Report(-1.0, 0.0)
        if age_s == last.age_s:
            return
        if age_s < last.age_s or busy_s < last.busy_s or not self._reports:
            self._reports.clear()  # other engines: their times cannot be compared
            self._engine_start = now - age_s
        # The report that arrived fastest tells best when the engines started.
        self._engine_start = min(self._engine_start, now - age_s)
        self._reports.append(Report(age_s, busy_s))

    def add_step(self, generating_s: float, now: float) -> None:
        self._steps.append(Phases(self._step_end, generating_s, now))
        self._step_end = now

    def fraction(self, start: float, now: float) -> float | None:
        """Return the busy fraction between the ends of two steps; None if it is not known yet.

        Forget what is older than `start`, which must not decrease.
        """
        while len(self._reports) > 2 and self._time(self._reports[1]) <= start:
            self._reports.popleft()
        if len(self._reports) < 2 or now <= start:
            return None
        first, last = self._reports[0], self._reports[-1]
        while self._steps and self._steps[0].end <= min(start, self._time(first)):
            self._steps.popleft()
        if not self._synchronous:  # the engines work in all phases
            fraction = (last.busy_s - first.busy_s) / (last.age_s - first.age_s)
        else:
            fraction = (self._busy_s(last, now) - self._busy_s(first, start)) / (now - start)
        return min(1.0, max(0.0, fraction))

    def _busy_s(self, report: Report, time: float) -> float:
        """Return the busy seconds of the engines at a time, from a report before or after it."""
        reported = self._time(report)
        since = (step.generated_s(time) - step.generated_s(reported) for step in self._steps)
        return report.busy_s + sum(since)

    def _time(self, report: Report) -> float:
        return self._engine_start + report.age_s
