"""The training witness: what each update was trained on, with the weights before and after it.

The process that trains writes it, so it does not depend on the ledger, which the controller writes.
The weights of a checkpoint name the update that made them, which names the weights before it, and
so on down to the initial model: the prompts of this chain are in the weights, whatever the ledger
says. Updates after the checkpoint that a killed run resumes from are not part of the chain.
"""

import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

PATH = "TEST_WITNESS"  # environment variable with the file that the workers write
WORKERS = Path(__file__).parent / "faults" / "workers"


def environment(file: Path) -> dict[str, str]:
    """Return the environment of a run whose training processes write to `file`."""
    return {
        **os.environ,
        PATH: str(file),
        "PYTHONPATH": f"{WORKERS}{os.pathsep}{Path(__file__).parents[1]}",
    }


def install() -> None:
    if PATH in os.environ:
        sys.meta_path.insert(0, _AfterImport())


def prompts_in(checkpoint: Path, model: Path, file: Path) -> list[list[list[int]]]:
    """Return the prompts of each step that led from the model to the checkpoint, as tokens."""
    records = [json.loads(line) for line in file.read_text().splitlines()]
    made_by = {(record["step"] + 1, record["after"]): record for record in records}
    weights, step = _saved(checkpoint), int(checkpoint.name.removeprefix("step_"))
    steps = []
    while step:
        record = made_by.get((step, weights))
        assert record, f"no update made the weights of step {step}"
        steps.append(record["prompts"])
        weights, step = record["before"], step - 1
    assert weights == _saved(model), "the first update did not start from the model"
    return steps[::-1]


def _saved(folder: Path) -> str:
    from safetensors.torch import load_file

    actor = folder / "actor"
    return _digest(load_file((actor if actor.exists() else folder) / "model.safetensors").items())


def _digest(weights: Iterable[tuple[str, Any]]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(weights, key=lambda item: item[0]):
        if name != "lm_head.weight":  # tied to the embedding, and then not in files
            found.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


class _AfterImport(MetaPathFinder):
    """Changes the actor when it is imported; other processes do not have to import torch."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "paceline.training.actor":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec and spec.loader
        execute = spec.loader.exec_module

        def execute_and_observe(module: ModuleType) -> None:
            execute(module)
            observe(module.Actor)

        spec.loader.exec_module = execute_and_observe  # type: ignore[method-assign]
        return spec


def observe(actor: Any) -> None:
    """Let the updates of this class be recorded."""
    update = actor.update

    def witnessed(self: Any, batch: Any, step: int, kl_coef: float | None = None) -> Any:
        before = _digest(self.engine.export_weights())
        metrics = update(self, batch, step, kl_coef)
        after = _digest(self.engine.export_weights())
        record = {"step": step, "before": before, "after": after, "prompts": _prompts(batch)}
        with open(os.environ[PATH], "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        return metrics

    actor.update = witnessed


def _prompts(batch: Any) -> list[list[int]]:
    """Return the prompt of each trajectory, which is that of its first row."""
    ends = batch.offsets
    rows = [slice(start, end) for start, end in pairwise(ends)]
    if (numbers := batch.trajectories) is not None:
        rows = [rows[numbers.tolist().index(number)] for number in dict.fromkeys(numbers.tolist())]
    return [batch.tokens[row][: int(batch.mask[row].argmax())].tolist() for row in rows]
