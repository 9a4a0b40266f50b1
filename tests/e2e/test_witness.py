"""The training witness finds what the ledger does not: a batch that was trained twice."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.data.source import open_source
from paceline.data.tiny import make_tokenizer
from paceline.training.actor import Actor
from paceline.training.assembly import assemble
from paceline.types import Batch, Group
from tests import witness
from tests.audits import assert_consistent
from tests.small_runs import config, run


@pytest.mark.parametrize("planted", [False, True])
def test_witness_finds_batch_that_was_trained_twice_behind_the_ledger(
    planted: bool, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[Batch] = []

    def assemble_again(groups: Sequence[Group]) -> Batch:
        batches.append(assemble(groups))
        return batches[1] if planted and len(batches) == 3 else batches[-1]

    monkeypatch.setattr("paceline.tasks.train.assemble", assemble_again)
    monkeypatch.setattr(Actor, "update", Actor.update)  # restored after the test
    monkeypatch.setenv(witness.PATH, str(tmp_path / "witness"))
    witness.observe(Actor)
    run(model, tmp_path / "run", "steps=4")
    assert_consistent(tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000004"
    steps = witness.prompts_in(checkpoint, Path(model), tmp_path / "witness")
    data = config(model, tmp_path).data
    prompts = open_source(data, make_tokenizer(), 0)
    expected = [
        [list(prompts[seq].tokens) for seq in range(4 * step, 4 * step + 4) for _ in range(4)]
        for step in range(4)
    ]
    assert (steps == expected) != planted
    assert steps[2] == expected[1 if planted else 2]
