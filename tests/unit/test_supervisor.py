"""Supervisor: which ends of a run it cures, how often, and what it forwards.

The runs are small programs that act according to the number of their attempt.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from paceline import supervisor
from paceline.cli.train import _how_to_resume
from paceline.config import load_config
from paceline.supervisor import SUPERVISOR, Supervisor, last_step, saved_step
from tests.fault_report import Fault
from tests.processes import ignores, nohup

ROOT = Path(__file__).parents[2]
# Every attempt makes a step. `acts` has one entry per attempt: an exit code, a signal such as "-9",
# with "+" after a new checkpoint, or "wait" for a signal.
PROGRAM = """
import os, pathlib, signal, sys, time
folder, acts = pathlib.Path(sys.argv[1]), sys.argv[2].split(",")
(folder / "checkpoints").mkdir(exist_ok=True)
number = len(list(folder.glob("attempt*")))
act = acts[min(number, len(acts) - 1)]
if act[0] != "?":
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": %d}\\n' % (number + 1))
if act[0] == "+":
    (folder / "checkpoints" / ("step_%08d" % (number + 1))).mkdir()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
(folder / f"attempt{number}").write_text(" ".join(sys.argv[3:]))
if "wait" in act:
    signal.pause()
code = int(act.strip("+?"))
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def supervise(folder: Path, acts: str, restarts: int = 3) -> tuple[int, int, list[str]]:
    """Return the exit code, the number of attempts and the messages of the supervisor."""
    told: list[str] = []
    command = [sys.executable, "-c", PROGRAM, str(folder), acts]

    async def run() -> int:
        return await Supervisor(folder, restarts, told.append).run([*command, "--fresh"], command)

    code = asyncio.run(run())
    return code, len(list(folder.glob("attempt*"))), told


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_DELAY_S", 0.001)


@pytest.mark.parametrize("end", ["-9", "-11", "-6", "1", "7", "8", "9", "12"])
@pytest.mark.fault("A9", "supervised run ends with {end}")
def test_run_that_dies_is_restarted(end: str, tmp_path: Path, fault: Fault) -> None:
    code, attempts, told = supervise(tmp_path, f"{end},0")
    assert (code, attempts) == (0, 2)
    fault.fired()
    assert "restart 1 of 3 from the start" in told[0] and len(told) == 1


@pytest.mark.parametrize("end", [0, 11, 13, 14, 130, 143])
def test_run_that_restart_cannot_cure_is_not_restarted(end: int, tmp_path: Path) -> None:
    assert supervise(tmp_path, f"{end},0") == (end, 1, [])


@pytest.mark.parametrize("end", [2, 3, 4, 5, 10])
def test_mistake_of_user_is_final_only_before_first_step(end: int, tmp_path: Path) -> None:
    assert supervise(tmp_path, f"?{end},0") == (end, 1, [])
    (tmp_path / "attempt0").unlink()
    code, attempts, told = supervise(tmp_path, f"{end},0")
    assert (code, attempts) == (0, 2) and f"exit code {end}" in told[0]


def test_mistake_in_fresh_run_is_final_when_earlier_run_made_steps(tmp_path: Path) -> None:
    assert supervise_fresh(tmp_path, 2) == (2, [])


def test_fresh_run_without_checkpoint_waits_when_earlier_run_had_one(tmp_path: Path) -> None:
    code, told = supervise_fresh(tmp_path, 1)
    assert code == 1 and told[0].endswith("restart 1 of 1 from the start in 0.001 s")


def supervise_fresh(folder: Path, code: int) -> tuple[int, list[str]]:
    """Supervise a run that moves an earlier one aside and ends before its first step."""
    (folder / "checkpoints" / "step_00000012").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 12}\n')
    program = (
        "import pathlib, shutil, sys; folder = pathlib.Path(sys.argv[1])\n"
        "(folder / 'metrics.jsonl').unlink(missing_ok=True)\n"
        "shutil.rmtree(folder / 'checkpoints', ignore_errors=True)\n"
        "sys.exit(int(sys.argv[2]))"
    )
    command = [sys.executable, "-c", program, str(folder), str(code)]
    told: list[str] = []
    return asyncio.run(Supervisor(folder, 1, told.append).run(command, command)), told


@pytest.mark.fault("A11", "supervised run dies at every start")
def test_supervisor_gives_up_when_restarts_make_no_checkpoint(tmp_path: Path, fault: Fault) -> None:
    code, attempts, told = supervise(tmp_path, "-9", restarts=3)
    assert (code, attempts) == (137, 4)
    fault.fired()
    assert "SIGKILL, which the kernel sends when memory is full" in told[0]
    assert told[-1].endswith("giving up after 3 restart(s) without a new checkpoint")


def test_new_checkpoint_restores_budget(tmp_path: Path) -> None:
    code, attempts, told = supervise(tmp_path, "+-9,+7,-9,+7,-9,0", restarts=2)
    assert (code, attempts) == (0, 6)
    assert "after step 4; restart 1 of 2 from the checkpoint of step 4" in told[3]
    events = [json.loads(line) for line in (tmp_path / "restarts.jsonl").read_text().splitlines()]
    assert [event["exit"] for event in events] == [-9, 7, -9, 7, -9]
    assert [event["saved_step"] for event in events] == [1, 2, 2, 4, 4]


def test_restart_waits_only_if_start_made_no_checkpoint(tmp_path: Path) -> None:
    _, _, told = supervise(tmp_path, "-9,+-9,-9,+-9,0")
    assert [text.rpartition(" step ")[2] for text in told[1:]] == ["2 now", "2 in 0.002 s", "4 now"]
    assert told[0].endswith("from the start in 0.001 s")


@pytest.mark.parametrize(
    ("restarts", "seconds"), [(1, 1), (2, 2), (6, 32), (7, 60), (8, 60), (5000, 60)]
)
def test_delay_doubles_up_to_its_limit_after_any_number_of_restarts(
    restarts: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_DELAY_S", 1.0)
    assert supervisor.delay_s(restarts) == seconds


def test_is_restart_is_true_once_in_restarted_run_only(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys; from paceline.supervisor import is_restart\n"
        "print(is_restart(), is_restart(), file=pathlib.Path(sys.argv[1], 'told').open('a'))\n"
        "sys.exit(1)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    asyncio.run(Supervisor(tmp_path, 1, print).run(command, command))
    assert (tmp_path / "told").read_text() == "False False\nTrue False\n"


def test_only_first_attempt_starts_over(tmp_path: Path) -> None:
    supervise(tmp_path, "-9,-9,0")
    assert [(tmp_path / f"attempt{n}").read_text() for n in range(3)] == ["--fresh", "", ""]


def start(folder: Path, acts: str, delay_s: float = 0.001) -> subprocess.Popen[str]:
    """Start a supervisor in a separate process."""
    program = (
        "import asyncio, pathlib, sys; from paceline import supervisor\n"
        "folder, delay_s, *command = sys.argv[1:]\n"
        "supervisor.FIRST_DELAY_S = float(delay_s)\n"
        "tell = lambda text: print(text, flush=True)\n"
        "watch = supervisor.Supervisor(pathlib.Path(folder), 3, tell)\n"
        "sys.exit(asyncio.run(watch.run(command, command)))"
    )
    child = [sys.executable, "-c", PROGRAM, str(folder), acts]
    command = [sys.executable, "-c", program, str(folder), str(delay_s), *child]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    wait_until(lambda: path.exists() or process.poll() is not None)
    assert process.poll() is None


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.fault("A13", "SIGTERM to a supervised run")
def test_sigterm_is_forwarded_and_ends_supervision(tmp_path: Path, fault: Fault) -> None:
    process = start(tmp_path, "-9,wait")
    wait_for(tmp_path / "attempt1", process)
    process.send_signal(signal.SIGTERM)
    fault.fired()
    output, _ = process.communicate(timeout=120)
    fault.detected()
    assert process.returncode == 143 and output.count("restart") == 1
    assert len(list(tmp_path.glob("attempt*"))) == 2


def test_supervisor_and_run_ignore_sighup_with_nohup(tmp_path: Path) -> None:
    with nohup():
        process = start(tmp_path, "wait")
    wait_for(tmp_path / "attempt0", process)
    for each in (process.pid, *(child.pid for child in psutil.Process(process.pid).children())):
        assert ignores(signal.SIGHUP, Path(f"/proc/{each}/status").read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 143


def test_hangup_is_forwarded_once_when_kernel_and_shell_send_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, sent = Supervisor(tmp_path, 3, print), list[int]()
    monkeypatch.setattr(watch, "_child", SimpleNamespace(send_signal=sent.append))
    for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):
        watch._forward(number)
    assert len(sent) == 2, "the second signal ends the run at once"


def test_signal_during_delay_ends_supervision(tmp_path: Path) -> None:
    process = start(tmp_path, "-9", delay_s=60)
    assert process.stdout is not None
    assert "in 60 s" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130
    assert len(list(tmp_path.glob("attempt*"))) == 1


def test_run_is_suspended_and_resumed_with_supervisor(tmp_path: Path) -> None:
    process = start(tmp_path, "wait")
    wait_for(tmp_path / "attempt0", process)
    both = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
    assert len(both) == 2
    process.send_signal(signal.SIGTSTP)
    wait_until(lambda: all(each.status() == psutil.STATUS_STOPPED for each in both))
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: all(each.status() == psutil.STATUS_SLEEPING for each in both))
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 143


@pytest.mark.fault("A12", "supervisor killed")
def test_child_ends_when_its_supervisor_is_killed(tmp_path: Path, fault: Fault) -> None:
    program = (
        "import os, signal; from paceline.supervisor import end_with_supervisor\n"
        f"assert os.environ[{SUPERVISOR!r}]\nend_with_supervisor()\n"
        f"assert {SUPERVISOR!r} not in os.environ\n"
        "print(os.getpid(), flush=True)\nsignal.pause()"
    )
    outer = (
        "import asyncio, pathlib, sys; from paceline.supervisor import Supervisor\n"
        "command = [sys.executable, '-c', sys.argv[1]]\n"
        "asyncio.run(Supervisor(pathlib.Path('.'), 1, print).run(command, command))"
    )
    command = [sys.executable, "-c", outer, program]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    process.kill()
    fault.fired()
    process.wait()
    assert psutil.wait_procs([child], timeout=60)[1] == [] or child.status() == "zombie"
    fault.detected()


@pytest.mark.parametrize(
    ("text", "step"), [(None, 0), ("", 0), ('{"step": 3}\n{"ste', 3), ('[1]\n{"x": 2}\n', 0)]
)
def test_last_step_is_read_from_damaged_metrics(
    text: str | None, step: int, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    assert last_step(tmp_path) == step


def test_saved_step_is_that_of_newest_checkpoint(tmp_path: Path) -> None:
    assert saved_step(tmp_path) == 0
    for name in ("step_00000003", "step_00000012", ".step_00000020.tmp", "step_best"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert saved_step(tmp_path) == 12


def test_stopped_run_names_its_last_checkpoint_beside_copies_of_user(tmp_path: Path) -> None:
    for name in ("step_00000004", "step_00000004.backup", "step_old"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    config = load_config("hybrid", [f"run_dir={tmp_path}"])
    assert _how_to_resume(config, "").endswith("continues from step 4")
