"""Asynchronous reinforcement learning for language models.

    run = paceline.train(model="Qwen/Qwen2.5-0.5B-Instruct", data="prompts.jsonl", reward=score)

`import paceline` does not import torch: the names below are imported when they are first used.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

# The threads of a matmul wait for each other by spinning, by default for milliseconds. While
# another program uses the cores, each of the fifty matmuls of a decode step then costs a time slice
# of the scheduler. A short spin makes an idle machine 3 % slower and a busy one several times
# faster. GNU OpenMP reads the variable when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

if TYPE_CHECKING:
    from paceline import sandbox
    from paceline.api import (
        Steps,
        evaluate,
        evaluate_async,
        sft,
        sft_async,
        steps,
        train,
        train_async,
    )
    from paceline.auditor.audit import audit
    from paceline.auditor.report import AuditReport
    from paceline.config import RunConfig, load_config
    from paceline.environment.protocol import Environment, Reply
    from paceline.errors import PacelineError
    from paceline.job import Run, Step
    from paceline.rollout.environment import AgentLoop, Generate
    from paceline.types import Batch, Completion, Group, Prompt, Score, Trajectory, Turn
    from paceline.version import __version__

_MODULES = {
    "paceline.api": (
        *("train", "train_async", "steps", "Steps", "evaluate", "evaluate_async"),
        *("sft", "sft_async"),
    ),
    "paceline.auditor.audit": ("audit",),
    "paceline.auditor.report": ("AuditReport",),
    "paceline.config": ("RunConfig", "load_config"),
    "paceline.errors": ("PacelineError",),
    "paceline.job": ("Run", "Step"),
    "paceline.environment.protocol": ("Environment", "Reply"),
    "paceline.rollout.environment": ("AgentLoop", "Generate"),
    "paceline.types": ("Batch", "Completion", "Group", "Prompt", "Score", "Trajectory", "Turn"),
    "paceline.version": ("__version__",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AgentLoop",
    "AuditReport",
    "Batch",
    "Completion",
    "Environment",
    "Generate",
    "Group",
    "PacelineError",
    "Prompt",
    "Reply",
    "Run",
    "RunConfig",
    "Score",
    "Step",
    "Steps",
    "Trajectory",
    "Turn",
    "__version__",
    "audit",
    "evaluate",
    "evaluate_async",
    "load_config",
    "sandbox",
    "sft",
    "sft_async",
    "steps",
    "train",
    "train_async",
]


def __getattr__(name: str) -> Any:
    if name == "sandbox":
        return importlib.import_module("paceline.sandbox")
    if name not in _HOME:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
