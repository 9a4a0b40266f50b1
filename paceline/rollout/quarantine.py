"""Quarantine of prompts on which engines die.

A prompt is suspected if it was on an engine that died. Most suspects are not the cause, because
an engine generates many prompts at once. So a prompt that was on two of them is generated without
other such prompts, and one that was on three is quarantined: it is dropped, now and in resumed
runs. A prompt that an engine completes is no longer suspected.

The file has one JSON line per event. It is not truncated when a run resumes.
"""

import json
import logging
from pathlib import Path

from paceline.errors import RolloutError

log = logging.getLogger(__name__)

MAX_DEATHS = 3  # engines that die on a prompt before the prompt is taken for the cause
ALONE_AT = 2  # engines that die on a prompt before it waits for its turn


class Quarantined(RolloutError):
    """A prompt is dropped because engines died on it."""


class Quarantine:
    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._deaths: dict[str, int] = {}  # by prompt; only of suspects
        self._holder: object | None = None  # the group that generates alone
        if path is not None and path.exists():
            self._read(path)

    def check(self, uid: str) -> None:
        """Raise if the prompt is quarantined."""
        if self._deaths.get(uid, 0) >= MAX_DEATHS:
            action = f". To try it again, delete {self._path} and resume" if self._path else ""
            raise Quarantined(
                f"prompt {uid} is quarantined: it was on {self._deaths[uid]} engines that died"
                f"{action}"
            )

    def suspect(self, uid: str, worker: str) -> None:
        """Record that an engine died while it generated the prompt."""
        self._deaths[uid] = self._deaths.get(uid, 0) + 1
        self._write(uid, worker)

    def clear(self, uid: str) -> None:
        """Record that an engine completed the prompt."""
        if self._deaths.pop(uid, 0):
            self._write(uid, None)

    def may_start(self, uid: str, group: object) -> bool:
        """Return whether a group may be given to an engine; if it must be alone, take the turn."""
        if self._deaths.get(uid, 0) < ALONE_AT or self._holder is group:
            return True
        if self._holder is None:
            self._holder = group
            return True
        return False

    def end_turn(self, group: object) -> bool:
        """End the turn of a group; return whether it had it."""
        if self._holder is not group:
            return False
        self._holder = None
        return True

    def _write(self, uid: str, worker: str | None) -> None:
        if self._path is None:
            return
        event = {"uid": uid, "deaths": self._deaths.get(uid, 0)}
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(event | ({"worker": worker} if worker else {})) + "\n")
        except OSError as error:  # the run can continue; a full disk ends it at the ledger
            log.warning("cannot record a suspected prompt in %s: %s", self._path, error)

    def _read(self, path: Path) -> None:
        for line in path.read_bytes().splitlines():
            try:
                event = json.loads(line)
                uid, deaths = event["uid"], event["deaths"]
                if not (isinstance(uid, str) and isinstance(deaths, int)):
                    raise TypeError
            except (ValueError, KeyError, TypeError, RecursionError):
                log.warning("%s: ignoring a damaged line", path)
                continue
            self._deaths.pop(uid, None)
            if deaths > 0:
                self._deaths[uid] = deaths
