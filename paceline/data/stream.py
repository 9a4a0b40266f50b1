"""Prompts from rows that come one after the other: a generator, an iterable dataset, a service.

Rows are taken when they are needed and never held as a whole. The order is the stream's. Where it
ends, it is opened again, as a new epoch. A resumed run continues exactly: it opens the stream and
skips the rows that it had taken, or restores the stream's own state.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.data.files import ParsedRow
from paceline.data.fingerprint import stable_text
from paceline.data.rows import BadRow, RowReader, TokenizedRow
from paceline.errors import DataError
from paceline.plugins import FAILURES
from paceline.printable import describe_error
from paceline.types import Group, Prompt

if TYPE_CHECKING:
    from paceline.data.prompts import RowSettings

log = logging.getLogger(__name__)

SHOWN_BAD_ROWS = 5  # logged one by one; the rest are counted


class RowsEndedError(DataError):
    """A stream has ended and cannot start again."""


@dataclass(frozen=True, slots=True)
class RowStream:
    """Rows of unknown number. An object with `state()` and `load_state()` can be restored."""

    origin: str  # its name in messages
    open: Callable[[], Iterable[Any]]
    reopens: bool  # whether `open` works more than once

    def parsed(self, row: Any, number: int) -> ParsedRow:
        where = f"row {number}"
        if isinstance(row, Mapping):
            return ParsedRow(where, row)
        problem = f"expected a dict of columns, got {type(row).__name__}"
        if isinstance(row, str):
            problem += "; write the text of a prompt as {'prompt': text}"
        return ParsedRow(where, {}, problem)


class PromptStream:
    """The prompts of a stream. Position `seq` is its seq-th usable row."""

    fingerprint: str
    """Hash of the first prompt; a run resumes only on the same data."""

    def __init__(
        self,
        settings: "RowSettings",
        stream: RowStream,
        tokenizer: RowReader,
        opened: Iterable[Any],
    ) -> None:
        """Read the first prompt. `opened` are the rows of the first epoch."""
        self._settings, self._stream, self._tokenizer = settings, stream, tokenizer
        self._start(opened)
        self._epoch_usable = False  # whether this epoch had a usable row
        self._examined = 0  # rows whose usability is known
        self._bad: dict[int, BadRow | None] = {}  # rows left out, by number since the start
        self._held: dict[int, TokenizedRow] = {}  # prompts that may be asked for again
        self._first = self._held[0] = self._next_row()
        content = [stream.origin] if self._keeps_state else [self._first.text, self._first.row]
        self.fingerprint = hashlib.sha256(stable_text(content).encode()).hexdigest()

    def _start(self, rows: Iterable[Any]) -> None:
        self._rows = rows
        self._iterator: Iterator[Any] = iter(rows)
        self._taken = 0  # rows since the start
        self._number = 0  # of the last row in its epoch
        self._next = 0  # position of the next usable row

    def __len__(self) -> int:
        raise DataError(
            f"{self._stream.origin}: the length of a stream is not known; set data.limit to "
            "use its first rows, or give a list"
        )

    def __getitem__(self, seq: int) -> Prompt:
        return self.row(seq).prompt()

    def row(self, seq: int) -> TokenizedRow:
        if seq not in self._held:
            if seq < self._next:
                self._rewind(seq)
            while self._next < seq and self._skip():
                pass
            while self._next <= seq:
                row = self._next_row()
                self._held[self._next - 1] = row
        return self._held[seq]

    def rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Return the first row with its location; the others do not exist yet."""
        return iter([(self._first.where, self._first.row)])

    @property
    def bad_rows(self) -> tuple[BadRow, ...]:
        return tuple(row for row in self._bad.values() if row)

    @property
    def longest(self) -> int:
        return self._tokenizer.max_length

    @property
    def highest_token(self) -> int:
        return int(self._first.tokens.max())

    def observe(self, groups: Sequence[Group]) -> None:
        """Forget prompts that were trained on. Older ones are trained or dropped, too."""
        self.forget(max(group.seq for group in groups))

    def forget(self, newest: int) -> None:
        """Forget the rows up to this position, which are not needed any more."""
        self._held = {seq: row for seq, row in self._held.items() if seq > newest}

    # -- checkpoints

    @property
    def _keeps_state(self) -> bool:
        return hasattr(self._rows, "state") and hasattr(self._rows, "load_state")

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"examined": self._examined, "bad": list(self._bad)}
        if self._keeps_state:
            rows: Any = self._rows
            state |= {"stream": rows.state(), "next": self._next, "number": self._number}
            state["held"] = [[seq, row.where, row.row] for seq, row in self._held.items()]
            try:
                json.dumps(state)
            except (TypeError, ValueError) as e:
                raise DataError(
                    f"{self._stream.origin} has state(), so its rows and its state are saved in "
                    f"checkpoints; expected JSON values ({e})"
                ) from e
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        self._examined = max(self._examined, state["examined"])
        self._bad |= dict.fromkeys(state["bad"])
        if self._keeps_state:
            rows: Any = self._rows
            rows.load_state(state["stream"])
            self._iterator = iter(rows)
            self._taken, self._next, self._number = (
                state["examined"],
                state["next"],
                state["number"],
            )
            self._held = {}
            reads = [ParsedRow(where, row) for _, where, row in state["held"]]
            for (seq, *_), row in zip(state["held"], self._tokenizer.tokenize(reads), strict=True):
                assert isinstance(row, TokenizedRow), "it was usable before"
                self._held[seq] = row

    # -- rows

    def _next_row(self) -> TokenizedRow:
        """Take rows up to the next one that is usable."""
        while True:
            read = self._take()
            if self._taken in self._bad:
                continue
            if self._taken == 1:
                self._tokenizer.check_columns([read.row], self._stream.origin)
            (row,) = self._tokenizer.tokenize([read])
            self._examined = max(self._examined, self._taken)
            if isinstance(row, TokenizedRow):
                self._next += 1
                self._epoch_usable = True
                return row
            self._leave_out(row)

    def _skip(self) -> bool:
        """Take a row that was usable before the run was resumed; return False at a new row."""
        if self._taken >= self._examined:
            return False
        self._take()
        if self._taken not in self._bad:
            self._next += 1
            self._epoch_usable = True
        return True

    def _take(self) -> ParsedRow:
        try:
            row = next(self._iterator)
        except StopIteration:
            row = self._first_of_next_epoch()
        except FAILURES as e:
            raise self._failed(e) from e
        self._taken += 1
        self._number += 1
        return self._stream.parsed(row, self._number)

    def _first_of_next_epoch(self) -> Any:
        origin = self._stream.origin
        if not self._stream.reopens:
            raise RowsEndedError(
                f"{origin} ended after {self._taken} rows, but the run needs more; give a list, "
                "an iterable that can start again, or a function as data.source"
            )
        if self._number and not self._epoch_usable:
            raise DataError(f"no usable rows in {origin}: all {self._number} were left out")
        try:
            self._rows = self._stream.open()
            self._iterator, self._number = iter(self._rows), 0
            self._epoch_usable = False
            return next(self._iterator)
        except StopIteration:
            raise DataError(
                f"{origin} has no rows" + (" when it starts again" if self._taken else "")
            ) from None
        except DataError:
            raise
        except FAILURES as e:
            raise self._failed(e) from e

    def _rewind(self, seq: int) -> None:
        """Open the stream again for a prompt that was given out before."""
        if not self._stream.reopens:
            raise DataError(
                f"{self._stream.origin} cannot give out prompt {seq} again; give a list instead"
            )
        self._start(self._stream.open())

    def _failed(self, error: BaseException) -> DataError:
        return DataError(
            f"{self._stream.origin} raised {describe_error(error)} (after {self._taken} rows)"
        )

    def _leave_out(self, row: BadRow) -> None:
        if self._settings.on_bad_row == "fail":
            raise DataError(
                f"a row of {self._stream.origin} cannot be used:\n  {row}\n"
                "Fix it, or leave it out with data.on_bad_row = 'skip'."
            )
        self._bad[self._taken] = row
        if len(self._bad) <= SHOWN_BAD_ROWS:
            log.warning("left out a row of %s: %s", self._stream.origin, row)
        if len(self._bad) == SHOWN_BAD_ROWS:
            log.warning("further rows are left out without a message")
