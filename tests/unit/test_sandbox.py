"""Programs in the sandbox: input, output, limits, and machines without bubblewrap."""

import errno
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline import sandbox
from paceline.errors import ConfigError, RewardError
from paceline.sandbox import runner
from paceline.sandbox.seccomp import MACHINES, program_filter
from tests.sandboxes import needs_bubblewrap

PACKAGE = Path(__file__).parents[2]


@pytest.fixture
def no_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide bubblewrap from a search that has not been made yet."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(runner, "_find", runner._find.__wrapped__)
    monkeypatch.setattr(runner, "_warn", runner._warn.__wrapped__)


@pytest.fixture(params=[pytest.param("bubblewrap", marks=needs_bubblewrap), "weak"])
def mode(request: pytest.FixtureRequest) -> str:
    if request.param == "weak":
        request.getfixturevalue("no_bubblewrap")
    return str(request.param)


def run(code: str, **limits: float) -> sandbox.Result:
    return sandbox.run(code, allow_weak=True, **limits)  # type: ignore[arg-type]


def test_result_has_output_and_exit_code(mode: str) -> None:
    code = "import sys; print(sys.stdin.read()[::-1]); print('é', file=sys.stderr); sys.exit(3)"
    result = sandbox.run(code, stdin="abc", allow_weak=True)
    assert result == sandbox.Result("cba\n", "é\n", 3, None, mode)  # type: ignore[arg-type]
    assert not result.ok and not result.timed_out and not result.truncated


def test_signal_is_reported_as_shells_do(mode: str) -> None:
    assert run("import os; os.kill(os.getpid(), 11)").exit_code == 139


def test_limits_hold_in_both_modes(mode: str) -> None:
    assert run("while True: pass", timeout_s=0.2).timed_out
    assert run("import time; time.sleep(60)", timeout_s=0.2).stopped == "time"
    assert run("print('x' * 10_000)", output_kb=1).truncated
    assert "MemoryError" in run("bytes(10**9)", memory_mb=200).stderr
    assert run("import os; os.close(1); os.close(2); os._exit(0)").ok


def test_environment_of_caller_is_not_visible(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary")
    result = run("import os; print(os.environ, open('/proc/self/environ').read())")
    assert result.ok and "canary" not in result.stdout


def test_any_text_is_program(mode: str) -> None:
    assert run("\ud800").exit_code == 1
    assert run("\0").exit_code == 1
    assert run("#" * 1_000_000 + "\nprint(1)").stdout == "1\n"


def test_program_without_output_ends_at_deadline(mode: str) -> None:
    code = "import os, time; os.close(1); os.close(2); time.sleep(60)"
    assert run(code, timeout_s=0.2).timed_out


def test_number_of_processes_is_limited(mode: str) -> None:
    code = (
        "import os, time\nfor _ in range(30):\n  if os.fork() == 0: time.sleep(60)\ntime.sleep(60)"
    )
    result = run(code, processes=8, timeout_s=20)
    assert result.stopped == "processes" or "Resource temporarily unavailable" in result.stderr


def test_concurrent_programs_do_not_mix_their_output(mode: str) -> None:
    codes = [f"import time; time.sleep(0.2); print({n})" for n in range(8)]
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda code: run(code, timeout_s=20), codes))
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(8)]


@needs_bubblewrap
def test_readable_directory_can_be_read_and_not_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "table").write_text("7")
    path = str(tmp_path / "table")
    code = f"print(open({path!r}).read()); open({path!r}, 'w')"
    result = sandbox.run(code, readable=[tmp_path])
    assert result.stdout == "7\n" and "Read-only file system" in result.stderr


def test_run_is_rejected_without_bubblewrap(no_bubblewrap: None) -> None:
    with pytest.raises(ConfigError, match=r"bubblewrap is not installed.*can use the network"):
        sandbox.run("print(1)")


def test_weak_mode_says_what_it_lacks(
    no_bubblewrap: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(runner.ALLOW_WEAK, "1")
    with caplog.at_level(logging.WARNING):
        assert sandbox.run("print(1)").sandbox == "weak"
    assert "without a sandbox" in caplog.text and "can use the network" in caplog.text


@pytest.mark.parametrize(
    "name", ["timeout_s", "cpu_s", "memory_mb", "processes", "output_kb", "disk_mb"]
)
def test_limit_of_zero_is_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} = 0; expected more than 0"):
        run("pass", **{name: 0})


@needs_bubblewrap
@pytest.mark.skipif(os.getuid() != 0, reason="takes privileges away from root")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv")
def test_forbidden_namespaces_are_reported() -> None:
    program = "from paceline import sandbox; sandbox.run('print(1)')"
    command = ["setpriv", "--bounding-set", "-sys_admin", sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE)
    assert "Operation not permitted); run as another user than root, or allow" in result.stderr


@needs_bubblewrap
@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
@pytest.mark.skipif(not os.access("/usr/bin/python3", os.X_OK), reason="needs a Python for all")
def test_user_without_privileges_has_sandbox() -> None:
    program = """if 1:
        import os, sys
        sys.path.insert(0, {!r})
        from paceline import sandbox  # before the directory is out of reach
        os.setgroups([]); os.setgid(12345); os.setuid(12345)
        result = sandbox.run("import os; print(os.getuid(), os.listdir('/tmp'))")
        print(result)
        assert result.stdout == "65534 ['program.py']\\n"
    """
    version = subprocess.run(["/usr/bin/python3", "-V"], capture_output=True, text=True).stdout
    if tuple(map(int, version.split()[1].split(".")[:2])) < (3, 11):
        pytest.skip(f"{version} is too old")
    command = ["/usr/bin/python3", "-c", program.format(str(PACKAGE))]
    result = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert result.returncode == 0, result.stdout + result.stderr


@needs_bubblewrap
@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv")
def test_escapes_fail_for_user_without_privileges() -> None:
    user = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"]
    packages = f"{PACKAGE}:{sysconfig.get_path('purelib')}"
    variables = {"PATH": os.environ["PATH"], "PYTHONPATH": packages, "PYTHONDONTWRITEBYTECODE": "1"}
    usable = f"import pytest, sys; assert sys.version_info[:2] == {sys.version_info[:2]}\n"
    usable += "from paceline import sandbox; sandbox.check(allow_weak=False)"
    for python in (sys.executable, "/usr/bin/python3"):  # the first may be in the home of root
        command = [*user, python, "-c", usable]
        if not (found := subprocess.run(command, env=variables, capture_output=True)).returncode:
            break
    else:
        pytest.skip(f"no Python or sandbox for other users: {found.stderr.decode()[-200:]}")
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, 12345, 12345)
        escapes = str(PACKAGE / "tests/unit/test_sandbox_escape.py")
        # The sandbox of another Python lacks the packages that these tests use.
        options = ["-rs", "-p", "no:cacheprovider", "-k", "not libraries and not packages"]
        command = [*user, python, "-m", "pytest", *options, f"--basetemp={folder}/t", escapes]
        result = subprocess.run(
            command, env=variables | {"HOME": folder}, capture_output=True, text=True, cwd=PACKAGE
        )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "SKIPPED" not in result.stdout, result.stdout


@pytest.mark.parametrize("machine", MACHINES)
def test_filter_is_made_of_whole_instructions(machine: str) -> None:
    found = program_filter(machine)
    assert found is not None and len(found) % 8 == 0 and len(found) // 8 < 4096


def test_other_machines_have_no_filter() -> None:
    assert program_filter("riscv64") is None


def test_weak_mode_leaks_no_descriptor_when_disk_is_full(
    no_bubblewrap: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(RewardError, match="No space left on device"):
        run("print(1)")
    assert len(os.listdir("/dev/fd")) == before
