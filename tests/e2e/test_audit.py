"""`paceline audit` finds every planted error, and nothing in the runs of the other tests."""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import paceline
from paceline.checksum import checksums
from paceline.cli import app
from paceline.errors import CheckpointError
from paceline.line_file import encode_line, intact_rows
from tests.audits import assert_consistent
from tests.models import random_model

ROWS = [{"prompt": f"say {i}"} for i in range(40)]
SETTINGS: dict[str, Any] = {
    "groups_per_step": 2,
    "group_size": 2,
    "schedule.max_staleness": 2,
    "schedule.on_sync": "swap",
    "save_every": 2,
    "keep_checkpoints": 3,
    "data.max_prompt_length": 32,
    "rollout.max_response_length": 6,
    "placement.threads": 1,
    "evaluation.every": 2,
}
LINE_FILES = ("ledger", "metrics", "samples", "evaluations", "distributions")
Row = dict[str, Any]
Edit = Callable[[list[Row]], object]


def letters(completion: str, row: Row) -> float:
    return sum(c.isalpha() for c in completion) / 10


def train(model: str, run_dir: Path, steps: int) -> None:
    paceline.train(
        model=model,
        data=ROWS[:36],
        evaluation_data=ROWS[36:],
        reward=letters,
        steps=steps,
        run_dir=str(run_dir),
        display=False,
        **SETTINGS,
    )


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an asynchronous run with evaluations that was stopped after step 3 and resumed."""
    root = tmp_path_factory.mktemp("runs")
    model = random_model(root / "model")
    train(model, root / "run", 3)
    train(model, root / "run", 6)
    return root / "run"


@pytest.fixture
def run(healthy: Path, tmp_path: Path) -> Path:
    return shutil.copytree(healthy, tmp_path / "run", symlinks=True)


def edit(path: Path, change: Edit) -> None:
    rows = list(intact_rows(path))
    change(rows)
    path.write_bytes(b"".join(map(encode_line, rows)))


def find(rows: list[Row], **wanted: Any) -> Row:
    return next(row for row in rows if wanted.items() <= row.items())


def problems(run: Path, check: str) -> str:
    return "\n".join(str(p) for p in paceline.audit(run).problems if p.check == check)


def test_healthy_run_has_no_problem(run: Path) -> None:
    report = assert_consistent(run)
    assert not report.notes
    assert report.counts["trained"] == 12 and report.counts["steps"] == 6
    assert report.counts["issued"] == 12 + report.counts["in_flight"]
    assert report.counts["checkpoints"] == 3 and report.counts["evaluations"] >= 3
    assert any(row["event"] == "reissued" for row in intact_rows(run / "ledger.jsonl"))


def twice(rows: list[Row], event: str, seq: int) -> None:
    row = find(rows, event=event, seq=seq)
    rows.insert(rows.index(row) + 1, row)


def swap(rows: list[Row], first: Row, second: Row) -> None:
    one, two = rows.index(first), rows.index(second)
    rows[one], rows[two] = second, first


def last_seq(rows: list[Row]) -> int:
    return int(max(row["seq"] for row in rows if row["event"] == "reissued"))


def trained(seq: int, **changes: Any) -> Edit:
    return lambda rows: find(rows, event="trained", seq=seq).update(changes)


LEDGER_ERRORS: dict[str, tuple[Edit, str, str]] = {
    "trained twice": (
        lambda rows: twice(rows, "trained", 3),
        "prompts",
        "prompt 3 is trained, but it was trained in step 2 before",
    ),
    "dropped after training": (
        lambda rows: rows.insert(-1, {"event": "dropped", "seq": 4, "reason": "stale"}),
        "prompts",
        "prompt 4 is dropped, but it was trained in step 3 before",
    ),
    "issued twice": (
        lambda rows: twice(rows, "issued", 2),
        "prompts",
        "prompt 2 is issued a second time",
    ),
    "never issued": (
        lambda rows: rows.remove(find(rows, event="issued", seq=1)),
        "prompts",
        "prompt 1 is missing: 2 is issued before it",
    ),
    "lost": (
        lambda rows: rows.remove(find(rows, event="trained", seq=3)),
        "order",
        "prompt 4 is trained, but 3 precedes it and has not ended",
    ),
    "lost before the restart": (
        lambda rows: rows.remove(find(rows, event="trained", seq=5)),
        "prompts",
        "prompt 5 was outstanding at the restart and is not issued again",
    ),
    "not issued again after the restart": (
        lambda rows: rows.remove(find(rows, event="reissued", seq=last_seq(rows))),
        "prompts",
        "was outstanding at the restart and is not issued again",
    ),
    "issued again after its training": (
        lambda rows: rows.insert(-1, {"event": "reissued", "seq": 0}),
        "prompts",
        "prompt 0 is issued again, but it is trained in step 1",
    ),
    "out of order": (
        lambda rows: swap(
            rows, find(rows, event="trained", seq=2), find(rows, event="trained", seq=3)
        ),
        "order",
        "prompt 3 is trained, but 2 precedes it",
    ),
    "beyond the bound": (trained(8, staleness=3), "staleness", "staleness 3 in step 5; expected 0"),
    "older than any version": (trained(2, staleness=2), "staleness", "staleness 2 in step 2"),
    "from the future": (trained(8, staleness=-1), "staleness", "staleness -1 in step 5"),
    "other step": (trained(9, step=7), "order", "step 8 follows step 5"),
    "too many in flight": (
        lambda rows: rows.extend({"event": "issued", "seq": 99 + i} for i in range(7)),
        "staleness",
        "prompts are in flight; at most 6 may be",
    ),
    "unknown event": (
        lambda rows: rows.append({"event": "eaten", "seq": 1}),
        "files",
        "is not an event of a prompt",
    ),
}


@pytest.mark.parametrize("name", LEDGER_ERRORS)
def test_audit_finds_error_of_ledger(name: str, run: Path) -> None:
    change, check, expected = LEDGER_ERRORS[name]
    edit(run / "ledger.jsonl", change)
    assert expected in problems(run, check)


def test_audit_finds_prompt_that_waited_too_long_whatever_its_recorded_staleness(
    run: Path,
) -> None:
    def wait(rows: list[Row]) -> None:
        """Move the training of prompt 0 behind two other steps."""
        rows[:] = [row for row in rows if row["event"] == "issued" and row["seq"] < 6]
        for step, seqs in enumerate([(1, 2), (3, 4), (5, 6), (0, 7)]):
            rows += [{"event": "issued", "seq": seq} for seq in (6, 7) if seq in seqs]
            rows += [
                {"event": "trained", "seq": seq, "uid": "x", "step": step, "staleness": 0}
                for seq in seqs
            ]

    edit(run / "ledger.jsonl", wait)
    assert "prompt 0 waited for 3 steps; schedule.max_staleness=2" in problems(run, "staleness")


OTHER_ERRORS: dict[str, tuple[str, Edit, str, str]] = {
    "metrics lack a step": (
        "metrics.jsonl",
        lambda rows: rows.pop(2),
        "metrics",
        "step 4 follows step 2",
    ),
    "metrics lack the last step": (
        "metrics.jsonl",
        lambda rows: rows.pop(),
        "checkpoints",
        "metrics.jsonl has no line that ends at byte",
    ),
    "metrics repeat a step": (
        "metrics.jsonl",
        lambda rows: rows.insert(2, rows[2]),
        "metrics",
        "step 3 follows step 3",
    ),
    "metrics have another staleness": (
        "metrics.jsonl",
        lambda rows: rows[4].update({"staleness/mean": 0.25}),
        "metrics",
        "staleness/mean is 0.25, but ledger.jsonl has",
    ),
    "metrics report another evaluation": (
        "metrics.jsonl",
        lambda rows: rows[0].update({"evaluation/reward": 7.0}),
        "evaluations",
        "evaluation/reward is 7.0; evaluations.jsonl has",
    ),
    "sample of another prompt": (
        "samples.jsonl",
        lambda rows: rows[1].update(seq=9),
        "metrics",
        "prompt 9 was not trained in step 2",
    ),
    "sample with another staleness": (
        "samples.jsonl",
        lambda rows: rows[1].update(staleness=9),
        "metrics",
        "staleness 9, but ledger.jsonl has",
    ),
    "evaluation is missing": (
        "evaluations.jsonl",
        lambda rows: rows.pop(1),
        "evaluations",
        ", which evaluations.jsonl does not have",
    ),
    "first evaluation is missing": (
        "evaluations.jsonl",
        lambda rows: rows.pop(0),
        "evaluations",
        "evaluation.first differs",
    ),
    "evaluation was repeated": (
        "evaluations.jsonl",
        lambda rows: rows.append(rows[1]),
        "evaluations",
        "follows step 6",
    ),
    "evaluation differs from the summary": (
        "evaluations.jsonl",
        lambda rows: rows[-1].update(reward=0.0123),
        "evaluations",
        "evaluation.last differs",
    ),
}


@pytest.mark.parametrize("name", OTHER_ERRORS)
def test_audit_finds_disagreement_of_files(name: str, run: Path) -> None:
    file, change, check, expected = OTHER_ERRORS[name]
    edit(run / file, change)
    assert expected in problems(run, check)


@pytest.mark.parametrize("name", LINE_FILES)
def test_audit_names_damaged_line(name: str, run: Path) -> None:
    path = run / f"{name}.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b": ", b":  ", 1)
    path.write_bytes(b"".join(lines))
    assert f"{name}.jsonl:2: is damaged" in problems(run, "files")


def test_audit_names_damaged_score_of_judge(run: Path) -> None:
    (run / "judge.jsonl").write_bytes(encode_line({"score": 1.0}).replace(b"1", b"2", 1))
    assert problems(run, "files") == "judge.jsonl:1: is damaged"


def test_audit_finds_every_deleted_and_repeated_line_of_ledger(run: Path) -> None:
    """Without the checkpoints, whose record of the ledger finds the same."""
    shutil.rmtree(run / "checkpoints")
    (run / "summary.json").unlink()
    assert_consistent(run)
    path = run / "ledger.jsonl"
    rows = list(intact_rows(path))
    last = max(number for number, row in enumerate(rows) if row["event"] == "trained")
    for number, row in enumerate(rows[: last + 1]):
        for kept in ([*rows[:number], *rows[number + 1 :]], [*rows[:number], row, *rows[number:]]):
            path.write_bytes(b"".join(map(encode_line, kept)))
            found = not paceline.audit(run).ok
            # A killed run may lack the end of the last step.
            assert found or (number == last and len(kept) < len(rows)), row


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def rewrite_state(checkpoint: Path) -> None:
    """Change the state and its checksum, as a checkpoint of another run would have them."""
    state = json.loads((checkpoint / "state.json").read_text())
    state["ledger"]["trained"] += 1
    (checkpoint / "state.json").write_text(json.dumps(state))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    digest = hashlib.sha256((checkpoint / "state.json").read_bytes()).hexdigest()
    manifest["files"]["state.json"] = digest
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


CHECKPOINT_ERRORS: dict[str, tuple[Callable[[Path], object], str]] = {
    "damaged weights": (
        lambda folder: flip(folder / "actor" / "model.safetensors"),
        "step_00000004/actor/model.safetensors: is damaged",
    ),
    "missing file": (
        lambda folder: (folder / "training" / "actor" / "optimizer.safetensors").unlink(),
        "optimizer.safetensors: is missing",
    ),
    "file too many": (
        lambda folder: (folder / "actor" / "x.bin").write_text("x"),
        "actor/x.bin: is not part of the checkpoint",
    ),
    "link": (
        lambda folder: (folder / "actor" / "x").symlink_to("/etc/passwd"),
        "actor/x: is a symbolic link",
    ),
    "damaged manifest": (
        lambda folder: (folder / "manifest.json").write_text('{"files": 3}'),
        "manifest.json: cannot be read",
    ),
    "other step": (
        lambda folder: folder.rename(folder.with_name("step_00000005")),
        "manifest.json: is that of step 4",
    ),
    "other run": (rewrite_state, "but ledger.jsonl has Counts("),
}


@pytest.mark.parametrize("name", CHECKPOINT_ERRORS)
def test_audit_finds_error_of_checkpoint(name: str, run: Path) -> None:
    change, expected = CHECKPOINT_ERRORS[name]
    change(run / "checkpoints" / "step_00000004")
    assert expected in problems(run, "checkpoints")


def test_audit_ignores_checkpoint_that_active_run_deletes_while_it_is_read(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oldest, *others = sorted(run.glob("checkpoints/step_*"))

    def delete_and_read(files: list[Path], like: dict[Path, str]) -> list[str]:
        shutil.rmtree(oldest, ignore_errors=True)
        return checksums(files, like)

    monkeypatch.setattr("paceline.auditor.checkpoints.checksums", delete_and_read)
    assert assert_consistent(run).counts["checkpoints"] == len(others)


def test_audit_finds_missing_last_checkpoint_and_wrong_best_one(run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "step_00000006")
    best = run / "checkpoints" / "best"
    best.unlink(missing_ok=True)
    best.symlink_to("step_00000009")
    found = paceline.audit(run)
    assert "after step 6, whose checkpoint is missing" in "\n".join(map(str, found.problems))
    assert "names 'step_00000009', which is no checkpoint" in problems(run, "evaluations")


def test_checkpoint_of_abandoned_attempt_is_noted_and_not_compared(run: Path) -> None:
    (run / "summary.json").unlink()
    rewrite_state(run / "checkpoints" / "step_00000006")
    assert problems(run, "checkpoints")
    (run / "attempts.jsonl").write_text('{"attempt": "a", "from_step": 4}\n{"atte')
    report = assert_consistent(run)
    assert "checkpoints/step_00000006 belongs to an attempt that was abandoned" in report.notes[0]


def test_audit_finds_wrong_counts_in_summary(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    summary["ledger"]["trained"] = 13
    (run / "summary.json").write_text(json.dumps(summary))
    assert "summary.json: has {" in problems(run, "summary")


def test_audit_finds_other_bound_in_config(run: Path) -> None:
    config = json.loads((run / "settings.json").read_text())
    config["schedule"]["max_staleness"] = 9
    (run / "settings.json").write_text(json.dumps(config))
    assert "max_staleness=2), but settings.json has" in problems(run, "checkpoints")


def test_audit_notices_flipped_bits_in_every_file(run: Path) -> None:
    numbers = random.Random(0)
    saved = [path for path in sorted(run.glob("checkpoints/step*/**/*")) if path.is_file()]
    for path in [*(run / f"{name}.jsonl" for name in LINE_FILES), *saved]:
        content = path.read_bytes()
        last = 8 * len(content) - 8  # the first bit of the last byte
        for bit in (last, *numbers.sample(range(8 * len(content)), 5)):
            damaged = bytearray(content)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            harmless = path.name == "manifest.json" and _same(content, damaged)
            assert not paceline.audit(run).ok or harmless, (path, bit)
        path.write_bytes(content)
    assert_consistent(run)


def _same(content: bytes, damaged: bytes) -> bool:
    """Return whether what the audit reads of two manifests is the same."""
    try:
        read = [json.loads(text) for text in (content, damaged)]
        return all(read[0][key] == read[1][key] for key in ("step", "files"))
    except (ValueError, KeyError):
        return False


@pytest.mark.parametrize("name", ["summary.json", "settings.json", "ledger.jsonl"])
def test_audit_reports_what_is_not_a_table_or_a_file(name: str, run: Path) -> None:
    other = b'{"schedule": 3, "evaluation": 1, "ledger": []}'
    for content in (b"", b"[]", other, b"\xff"):
        (run / name).write_bytes(content)
        report = paceline.audit(run)
        # A summary of other steps than those of the metrics is out of date, which is no problem.
        assert not report.ok or (name == "summary.json" and content == other and report.notes)
    (run / name).unlink()
    os.mkfifo(run / name)
    assert f"{name}: is not a regular file" in problems(run, "files")


def test_audit_reports_attempts_that_are_not_a_file(run: Path) -> None:
    (run / "attempts.jsonl").unlink()
    os.mkfifo(run / "attempts.jsonl")
    assert "attempts.jsonl: cannot be read: it is not a regular file" in problems(run, "files")


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs /proc")
@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl", "attempts.jsonl"])
def test_audit_reports_file_that_disk_cannot_read(name: str, run: Path) -> None:
    (run / name).unlink()
    (run / name).symlink_to("/proc/self/mem")  # reading it fails as on a broken disk
    assert f"{name}: cannot be read: [Errno 5]" in problems(run, "files")


def test_killed_run_has_no_problem(run: Path) -> None:
    """Its ledger ends anywhere after the last step that was flushed."""
    (run / "summary.json").unlink()
    shutil.rmtree(run / "checkpoints" / "step_00000006")
    content = (run / "ledger.jsonl").read_bytes()
    fifth = content.index(b'"step": 5')
    start = content.rindex(b"\n", 0, fifth) + 1
    for length in range(start, len(content), 3):
        (run / "ledger.jsonl").write_bytes(content[:length])
        report = assert_consistent(run)
    assert any("no summary.json" in note for note in report.notes)


def test_command_prints_report_and_exit_code(run: Path) -> None:
    result = CliRunner().invoke(app, ["audit", str(run)])
    assert result.exit_code == 0, result.output
    assert "ok    prompts" in result.output and "12 trained" in result.output
    edit(run / "ledger.jsonl", trained(8, staleness=3))
    result = CliRunner().invoke(app, ["audit", str(run), "--json"])
    report = json.loads(result.output)
    assert result.exit_code == 1 and not report["ok"]
    assert {"check", "where", "what"} == set(report["problems"][0])
    result = CliRunner().invoke(app, ["audit", str(run)])
    assert result.exit_code == 1 and "FAIL  staleness" in result.output


def test_audit_rejects_directory_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected the directory of a run"):
        paceline.audit(tmp_path)
    assert CliRunner().invoke(app, ["audit", os.devnull]).exit_code == CheckpointError.exit_code
