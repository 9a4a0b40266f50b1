"""Runs and saves that are killed at a chosen point, compared with an undisturbed run."""

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.training.checkpoint import latest_checkpoint, verify_checkpoint
from tests.audits import assert_consistent
from tests.fault_report import Fault
from tests.faults.killable import Killable
from tests.models import random_model
from tests.small_runs import weights

KILLED = -signal.SIGKILL
STEPS = 4  # two epochs
ROWS = 8


@dataclass(frozen=True)
class Point:
    row: str
    what: str
    target: str
    number: int
    when: str = "before"
    slow: bool = True

    @property
    def kill(self) -> tuple[str, int, str]:
        return f"paceline.{self.target}", self.number, self.when


ENGINE, LEDGER = "training.single:SingleDevice", "queue.ledger:Ledger"
QUEUE = "queue.message_queue:MessageQueue"
CHECKPOINT, SYNC = "training.checkpoint", "synchronizer:ParameterSynchronizer"
POINTS = [
    Point("A11", "before its first step", f"{LEDGER}.issue", 1),
    Point("A11", "in step 1, before the first checkpoint", f"{ENGINE}.optimizer_step", 1, "after"),
    Point("A11", "at the end of an epoch", f"{LEDGER}.trained", ROWS, "after", slow=False),
    Point("A11", "after its last step", "observe.recorder:Recorder.step_done", STEPS, "after"),
    Point("A11", "before its summary is written", "observe.recorder:Recorder.summary", 1),
    Point("A6", "with groups in its queue", f"{QUEUE}.put", 10, "after"),
    Point("A6", "with groups taken for a step", f"{QUEUE}.take", 3, "after"),
    Point("A7", "before forward and backward", f"{ENGINE}.forward_backward", 3),
    Point("A7", "between backward and step", f"{ENGINE}.optimizer_step", 3, slow=False),
    Point("A7", "between step and publication", f"{ENGINE}.optimizer_step", 3, "after"),
    Point("A7", "between publication and ledger", f"{SYNC}.sync_weights", 4, "after"),
    Point("A9", "while it issues a prompt", f"{LEDGER}.issue", 14),
    Point("A9", "in the middle of a batch of the ledger", f"{LEDGER}.trained", 10, slow=False),
    Point("A9", "between ledger and metrics", "observe.recorder:Recorder.step_done", 3),
    Point("A9", "between metrics and ledger's flush", f"{LEDGER}.flush", 3),
    Point("A8", "before weights are written", "training.trainer:Trainer.snapshot", 1),
    Point("A8", "between weights and other files", "training.trainer:Trainer.written", 1, "after"),
    Point("A8", "before the manifest", f"{CHECKPOINT}:_digests", 1),
    Point("A8", "after the rename, before old ones are deleted", f"{CHECKPOINT}:_prune", 2),
    Point("A8", "before its second checkpoint is complete", f"{CHECKPOINT}:_finish", 2, slow=False),
]


@pytest.fixture(scope="module")
def killable() -> Iterator[Killable]:
    with Killable("paceline.run") as process:
        yield process


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("inputs")
    rows = [{"prompt": f"{number} {number}", "answer": "1"} for number in range(ROWS)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [
        f"model={random_model(folder / 'model')}",
        f"data.path={folder}/rows.jsonl",
        f"reward.function={Path(__file__).parents[1]}/rewards.py:letters",
        *(f"steps={STEPS}", "groups_per_step=4", "group_size=2", "save_every=2"),
        *("keep_checkpoints=1", "rollout.max_response_length=8", "data.max_prompt_length=32"),
        *("placement.threads=1", "train.learning_rate=1e-3"),
    ]


def train(
    killable: Killable, run_dir: Path, settings: list[str], kill: tuple[str, int, str] | None = None
) -> int:
    log = run_dir.with_suffix(".log")
    code = killable.run("train", str(log), f"run_dir={run_dir}", *settings, kill=kill)
    assert code in (0, KILLED), log.read_text()
    return code


@pytest.fixture(scope="module")
def undisturbed(
    killable: Killable, settings: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    assert train(killable, run_dir, settings) == 0
    return run_dir


def check_same(run_dir: Path, other: Path) -> None:
    """Check that two runs trained the same prompts into the same weights, bit for bit."""
    assert weights(run_dir, STEPS) == weights(other, STEPS)
    assert (run_dir / "ledger.jsonl").read_text() == (other / "ledger.jsonl").read_text()


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(
            point,
            id=point.what,
            marks=[
                pytest.mark.fault(point.row, f"run killed {point.what}"),
                *([pytest.mark.slow] if point.slow else []),
            ],
        )
        for point in POINTS
    ],
)
def test_killed_run_continues_bit_for_bit(
    point: Point,
    killable: Killable,
    settings: list[str],
    undisturbed: Path,
    tmp_path: Path,
    fault: Fault,
) -> None:
    run_dir = tmp_path / "run"
    assert train(killable, run_dir, settings, point.kill) == KILLED
    fault.fired()
    if (run_dir / "metrics.jsonl").exists():
        assert_consistent(run_dir)
    assert train(killable, run_dir, settings) == 0
    fault.recovered()
    check_same(run_dir, undisturbed)
    fault.audited(run_dir)
    assert not list((run_dir / "checkpoints").glob(".*")), "part of a checkpoint was left behind"


@pytest.mark.slow
@pytest.mark.fault("A11", "run killed, and killed again while it resumes")
def test_run_that_is_killed_while_it_resumes_continues_bit_for_bit(
    killable: Killable, settings: list[str], undisturbed: Path, tmp_path: Path, fault: Fault
) -> None:
    run_dir = tmp_path / "run"
    for target in (f"{CHECKPOINT}:_prune", "run:_Run._restore"):
        kill = f"paceline.{target}", 1, "after"
        assert train(killable, run_dir, settings, kill) == KILLED
    fault.fired()
    assert train(killable, run_dir, settings) == 0
    fault.recovered()
    check_same(run_dir, undisturbed)
    fault.audited(run_dir)


@pytest.fixture(scope="module")
def saving() -> Iterator[Killable]:
    with Killable("paceline.training.checkpoint") as process:
        yield process


OPERATIONS = {
    "a directory is made": "pathlib:Path.mkdir",
    "a file is written": "pathlib:Path.write_text",
    "weights are written": "pathlib:Path.write_bytes",
    "a file is synced": "os:fsync",
    "a checkpoint gets or loses its name": "pathlib:Path.rename",
    "files are deleted": "shutil:rmtree",
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.fault("A8", "save killed whenever {operation}")
def test_killed_save_leaves_a_whole_checkpoint(
    operation: str, saving: Killable, tmp_path: Path, fault: Fault
) -> None:
    for when in ("before", "after"):
        for number in range(1, 100):
            root = tmp_path / f"{when}{number}"
            assert saving.run("save", str(root), 1) == 0
            code = saving.run("save", str(root), 2, kill=(OPERATIONS[operation], number, when))
            if code == 0:  # there is no such call any more
                break
            assert code == KILLED
            fault.fired()
            found = latest_checkpoint(root)
            assert found and found.name in ("step_00000001", "step_00000002")
            for folder in root.glob("step_*"):
                verify_checkpoint(folder)
            assert saving.run("save", str(root), 3) == 0
            assert [path.name for path in root.iterdir()] == ["step_00000003"]
