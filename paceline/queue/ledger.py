"""The ledger: every issued prompt was trained once, dropped for a named reason, or is outstanding.

The file has one JSON line with a checksum per event. A checkpoint stores the state and the length
of the file; a resumed run truncates the file there, so that ledger and weights describe the same
moment.
"""

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import LedgerError
from paceline.line_file import LineFile


@dataclass(frozen=True, slots=True)
class LedgerState:
    next_seq: int  # the prompt cursor: the first prompt never issued
    outstanding: tuple[int, ...]  # neither trained nor dropped; issued again after a restart
    trained: int
    dropped: dict[str, int]
    length: int  # bytes of the file when this was taken

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "LedgerState":
        return cls(**{**data, "outstanding": tuple(data["outstanding"])})


class Ledger:
    def __init__(self, path: Path | None = None, state: LedgerState | None = None) -> None:
        state = state or LedgerState(0, (), 0, {}, 0)
        self.next_seq = state.next_seq
        self.trained_count = state.trained
        self.dropped: Counter[str] = Counter(state.dropped)
        self._outstanding: dict[int, None] = dict.fromkeys(state.outstanding)
        self._reissue = list(state.outstanding)
        self._file = LineFile(path, state.length, locked=True) if path is not None else None

    @property
    def outstanding(self) -> list[int]:
        return list(self._outstanding)

    @property
    def issued(self) -> int:
        return self.next_seq

    def issue(self) -> int:
        """Return the next prompt: first those that the run left unfinished, then new ones."""
        if self._reissue:
            seq = self._reissue.pop(0)
            self._write("reissued", seq)
            return seq
        seq = self.next_seq
        self.next_seq += 1
        self._outstanding[seq] = None
        self._write("issued", seq)
        return seq

    def trained(self, seq: int, *, uid: str, step: int, staleness: int) -> None:
        self._settle(seq, "trained")
        self.trained_count += 1
        self._write("trained", seq, uid=uid, step=step, staleness=staleness)

    def drop(self, seq: int, reason: str, detail: str = "") -> None:
        self._settle(seq, f"dropped ({reason})")
        self.dropped[reason] += 1
        self._write("dropped", seq, reason=reason, **({"detail": detail} if detail else {}))

    def counts(self) -> dict[str, Any]:
        return {
            "issued": self.issued,
            "trained": self.trained_count,
            "dropped": dict(self.dropped),
            "outstanding": len(self._outstanding),
        }

    def check(self) -> None:
        settled = self.trained_count + self.dropped.total() + len(self._outstanding)
        if settled != self.issued:
            raise LedgerError(f"the ledger does not balance: {self.counts()}")

    def state(self) -> LedgerState:
        length = self._file.durable_length() if self._file else 0
        return LedgerState(
            self.next_seq, tuple(self._outstanding), self.trained_count, dict(self.dropped), length
        )

    def flush(self) -> None:
        if self._file:
            self._file.flush()

    def close(self) -> None:
        if self._file:
            self._file.close()
            self._file = None

    def _settle(self, seq: int, what: str) -> None:
        if seq not in self._outstanding:
            raise LedgerError(
                f"group {seq} was {what}, but it is not outstanding: it was settled before, "
                "or never issued"
            )
        del self._outstanding[seq]

    def _write(self, event: str, seq: int, **more: Any) -> None:
        if self._file:
            self._file.write({"event": event, "seq": seq, **more})
