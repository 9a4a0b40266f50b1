"""One process that runs episodes or tools, as the controller sees it."""

import asyncio
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.environment.protocol import EnvironmentFailure
from paceline.errors import ConfigError
from paceline.remote.calls import Died, Hung, Interrupted, Lost, Overdue
from paceline.remote.child import Child

GRACE_S = 5.0  # for a busy event loop to cancel a call and to report that


class EnvironmentProcess(Child):
    """The process and its episodes."""

    def __init__(
        self,
        place: int,
        kind: str,
        name: str,
        code: Sequence[str],
        timeout_s: float,
        variables: Mapping[str, str],
        changed: Callable[["EnvironmentProcess"], None],
    ) -> None:
        """Start the process. `changed` is called when it is lost and when it should be replaced."""
        self.place, self.episodes = place, 0
        self.stuck = False  # a call left something behind; the process is replaced once it is idle
        self._timeout_s, self._changed = timeout_s, changed
        self.cause = ""  # of its end
        allowed_s = timeout_s + min(GRACE_S, timeout_s)
        module, arguments = "paceline.environment.worker", [str(timeout_s), kind, *code]
        super().__init__(kind, name, module, arguments, variables, allowed_s)

    @property
    def worker(self) -> str:
        return f"environment worker {self.place} (process {self.process.pid})"

    @property
    def lost(self) -> bool:
        return self._lost is not None

    async def call(self, episode: int, method: str, argument: Any) -> Any:
        """Call a method of an episode. Raises EnvironmentFailure, which names worker and cause."""
        try:
            packed = pickle.dumps(argument)
        except Exception as error:
            raise EnvironmentFailure(
                f"{method}() cannot be called, because its argument cannot be sent to a process: "
                f"{error}"
            ) from error
        try:
            self.check()
            number, reply = self.calls.add()
            self.send((number, episode, method, packed))
            return await reply
        except asyncio.CancelledError:
            if not self.lost:
                self.send((0, episode, "cancel", number))
            raise
        except (Lost, Overdue) as error:
            raise EnvironmentFailure(self._failed(method, error)) from None

    def _failed(self, method: str, error: Lost | Overdue) -> str:
        late = f"longer than rollout.environment_timeout_s = {self._timeout_s:g} s"
        if isinstance(error, Overdue):
            return f"{method}() took {late}"
        if isinstance(error, Hung):
            why = "did not respond, because it was suspended" if self.suspended else "was blocked"
            return f"{method}() took {late}; {self.worker} {why}, and was killed"
        if isinstance(error, Died):
            return f"{self.worker} died during {method}(): {error}"
        return f"{self.worker} was lost with its episodes: {self.cause}"

    def _receive(self, message: dict[str, Any]) -> None:
        if "number" in message:
            self.stuck |= bool(message.get("stuck"))
            self.calls.finish(message["number"], _result(message))
            if self.stuck:
                self._changed(self)
        elif "started" in message:
            self.calls.started(message["started"])
        elif "problem" in message:
            self._loaded.set_exception(ConfigError(message["problem"]))
        elif message["ready"]:
            self._loaded.set_result(True)

    def _hang(self) -> None:
        super()._hang()
        self.cause = (
            f"a call blocked it for longer than rollout.environment_timeout_s = "
            f"{self._timeout_s:g} s"
        )
        self._changed(self)

    async def _report_death(self) -> None:
        await super()._report_death()
        self.cause = self.cause or str(self._lost)
        self._lost = Interrupted()  # for the calls of other episodes
        self._changed(self)


def _result(message: dict[str, Any]) -> Any:
    if "problem" in message:
        return EnvironmentFailure(message["problem"])
    return Overdue() if "overdue" in message else message["value"]
