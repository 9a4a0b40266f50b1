"""Callbacks of transformers (`TrainerCallback`) during a run."""

import inspect
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from paceline.errors import ConfigError
from paceline.trl.config import GRPOConfig
from paceline.trl.history import TrainerState

log = logging.getLogger(__name__)

FIRED = ("on_init_end", "on_train_begin", "on_step_end", "on_log", "on_evaluate", "on_train_end")
MORE = {"on_log": ("logs",), "on_evaluate": ("metrics",)}  # keywords of events
BASE = "transformers.trainer_callback"  # where the methods that do nothing are defined
# Flags of `control` without effect, and what to do instead. The run does not wait for callbacks, so
# it is in a later step when one of them sets a flag.
IGNORED = {
    "should_save": "set save_steps",
    "should_evaluate": "set eval_strategy and eval_steps",
    "should_log": "set logging_steps",
    "should_epoch_stop": "set control.should_training_stop to end the run",
}


class Callbacks:
    """Callbacks, called with TRL's arguments: args, state, control and keywords."""

    def __init__(self, callbacks: Sequence[Any], args: GRPOConfig, state: TrainerState) -> None:
        """Raise ConfigError for a callback that waits for an event that never comes."""
        self._args, self._state = args, state
        self._callbacks: list[Any] = []
        self._control = SimpleNamespace(should_training_stop=False, **dict.fromkeys(IGNORED, False))
        self._warned: set[tuple[str, str]] = set()
        for one in callbacks:
            self.add(one)
        self.fire("on_init_end")

    def add(self, callback: Any) -> None:
        """Raise ConfigError for a callback that cannot be called."""
        one = callback() if isinstance(callback, type) else callback
        kind = type(one).__name__
        for event in (name for name in dir(one) if name.startswith("on_")):
            method = getattr(one, event)
            if not callable(method) or method.__module__ == BASE:
                continue
            if event not in FIRED:
                raise ConfigError(
                    f"callbacks: {kind} implements {event}, which Paceline does not call; it calls "
                    f"{', '.join(FIRED)}"
                )
            try:
                inspect.signature(method).bind(
                    None, None, None, **dict.fromkeys(MORE.get(event, ()))
                )
            except TypeError as e:
                raise ConfigError(
                    f"callbacks: {kind}.{event} is called with args, state and control: {e}; "
                    "give other parameters a default, for example model=None, and accept **kwargs"
                ) from e
        self._callbacks.append(one)

    def remove(self, callback: Any) -> None:
        """Remove a callback, or the first one of a class."""
        for one in self._callbacks:
            if one is callback or (isinstance(callback, type) and isinstance(one, callback)):
                return self._callbacks.remove(one)

    @property
    def stop_requested(self) -> bool:
        return bool(self._control.should_training_stop)

    def fire(self, event: str, **more: Any) -> None:
        if event == "on_train_begin":
            self._control.should_training_stop = False
        for one in self._callbacks:
            method = getattr(one, event, None)
            if callable(method):
                method(self._args, self._state, self._control, **more)
                self._warn(type(one).__name__)

    def _warn(self, callback: str) -> None:
        """Warn once about each flag without effect that a callback has set, and clear it."""
        for flag, action in IGNORED.items():
            if getattr(self._control, flag):
                setattr(self._control, flag, False)
                if (callback, flag) not in self._warned:
                    self._warned.add((callback, flag))
                    log.warning(
                        "callback %s set control.%s, which has no effect; %s",
                        *(callback, flag, action),
                    )
