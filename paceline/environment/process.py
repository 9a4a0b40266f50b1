"""One process that runs episodes or tools, as the controller sees it."""

import asyncio
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.environment.protocol import EnvironmentFailure
from paceline.errors import ConfigError
from paceline.remote.calls import Died, Hung, Interrupted, Lost, Overdue
from paceline.remote.child import Child, end_all

GRACE_S = 5.0  # for a busy event loop to cancel a call and to report that


@dataclass(frozen=True, slots=True)
class HostedCode:
    """What an environment worker runs."""

    kind: str  # "environment" or "tools"
    name: str  # for messages
    arguments: tuple[str, ...]  # the class and its arguments as JSON, or the functions
    timeout_s: float  # of a call


class EnvironmentProcess(Child):
    """The process and its episodes."""

    def __init__(
        self,
        place: int,
        code: HostedCode,
        variables: Mapping[str, str],
        changed: Callable[["EnvironmentProcess"], None],
        node: str = "",
    ) -> None:
        """Start the process. `changed` is called when it is lost and when it should be replaced.

        `node` is the name of this machine for messages, if it is not that of the controller.
        """
        self.place, self.episodes = place, 0
        self.stuck = False  # a call left something behind; the process is replaced once it is idle
        self._timeout_s, self._changed = code.timeout_s, changed
        self._node = node
        self.cause = ""  # of its end
        allowed_s = code.timeout_s + min(GRACE_S, code.timeout_s)
        arguments = [str(code.timeout_s), code.kind, *code.arguments]
        module = "paceline.environment.worker"
        super().__init__(code.kind, code.name, module, arguments, variables, allowed_s)

    @property
    def worker(self) -> str:
        where = f" on {self._node}" if self._node else ""
        return f"environment worker {self.place} (process {self.process.pid}{where})"

    @property
    def lost(self) -> bool:
        return self._lost is not None

    async def call(self, episode: int, method: str, argument: Any) -> Any:
        """Call a method of an episode. Raises EnvironmentFailure, which names worker and cause."""
        return await self.call_packed(episode, method, packed(method, argument))

    async def call_packed(self, episode: int, method: str, packed: bytes) -> Any:
        """Call a method with an argument that is pickled already."""
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

    async def close(self) -> None:
        """End the process, which first closes the episodes that are still open."""
        self.calls.fail(Died("the run has ended"))
        self.disconnect()
        await asyncio.to_thread(end_all, [self], ())

    async def end(self) -> None:
        """Kill the process with all its descendants."""
        self.disconnect()
        await asyncio.to_thread(self.kill)

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


def packed(method: str, argument: Any) -> bytes:
    """Return the argument of a call as bytes. Raises EnvironmentFailure if it has none."""
    try:
        return pickle.dumps(argument)
    except Exception as error:
        raise EnvironmentFailure(
            f"{method}() cannot be called, because its argument cannot be sent to a process: "
            f"{error}"
        ) from error


def _result(message: dict[str, Any]) -> Any:
    if "problem" in message:
        return EnvironmentFailure(message["problem"])
    return Overdue() if "overdue" in message else message["value"]
