"""Worker parts with an engine that one prompt kills."""

import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.config import RunConfig
from paceline.types import Request, Role
from paceline.workers.build import build_parts

POISON_TOKENS = 20  # length of the prompt; the others are shorter


def build_with_poison(
    roles: Sequence[Role], config: RunConfig, model_path: str, threads: int
) -> Mapping[str, Any]:
    """Build an engine whose process is killed in the first step with the poison prompt."""
    parts = build_parts(roles, config, model_path, threads)
    if Role.ROLLOUT in parts:
        engine = parts[Role.ROLLOUT]._engine
        submit, step, poisoned = engine.submit, engine.step, []

        def record(requests: Sequence[Request]) -> None:
            submit(requests)
            poisoned.extend(request for request in requests if len(request.prompt) >= POISON_TOKENS)

        def die() -> Any:
            if poisoned:
                os.kill(os.getpid(), signal.SIGKILL)
            return step()

        engine.submit, engine.step = record, die
    return parts
