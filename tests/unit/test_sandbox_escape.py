"""Attempts of a program to leave the sandbox. Each prints ESCAPED if it succeeds; none may.

The first ones succeed in the weak mode, which shows that the attempts are real. Whether the others
do depends on the user, the kernel and its settings.
"""

import os
import resource
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack

import psutil
import pytest

from paceline import sandbox
from paceline.sandbox.supervisor import Limits
from paceline.sandbox.weak import run_weakly
from tests.fault_report import Fault
from tests.sandboxes import needs_bubblewrap

pytestmark = needs_bubblewrap

# What every user can do without a sandbox.
REAL = {
    "connects to a server of the machine": "socket.create_connection(('127.0.0.1', PORT), 2)",
    "connects to a Unix socket": "socket.socket(socket.AF_UNIX).connect(UNIX)",
    "connects to an abstract socket": "socket.socket(socket.AF_UNIX).connect('\\0' + ABSTRACT)",
    "reads a file of the user": "open(SECRET).read()",
    "reads a file through a symlink": "os.symlink(SECRET, 'link'); open('link').read()",
    "lists the run directory": "os.listdir(os.path.dirname(SECRET))",
    "writes a file of the user": "open(SECRET + '.new', 'w').write('x')",
    "ends a process of the user": "os.kill(VICTIM, 15)",
    "finds a process of the user": "os.getpgid(VICTIM)",
    "reads the name of the machine": "assert socket.gethostname() == HOST",
    "traces its own child": """
        if (pid := os.fork()) == 0: time.sleep(2); os._exit(0)
        traced = libc.ptrace(16, pid, 0, 0); os.kill(pid, 9); assert traced == 0
    """,
    "holds memory in a file without a name": "os.memfd_create('memory')",
    "holds memory in a System V segment": "assert libc.shmget(0, 2**20, 0o600) >= 0",
    "holds memory in message queues": "assert libc.msgget(0, 0o600) >= 0",
    "holds memory in semaphores": "assert libc.semget(0, 1000, 0o600) >= 0",
    "holds shared memory without a file": "mmap.mmap(-1, 2**20)",
    "holds shared memory of a device": """
        mmap.mmap(os.open('/dev/zero', os.O_RDWR), 2**20)
    """,
    "holds memory in a pipe": """
        vector = (ctypes.c_void_p * 2)(ctypes.addressof(ctypes.create_string_buffer(9)), 1)
        assert libc.vmsplice(os.pipe()[1], vector, 1, 0) == 1
    """,
}
OTHERS = {
    "holds memory in a secret file": "assert libc.syscall(447, 0) >= 0",
    "holds memory in a named queue": """
        number = 240 if os.uname().machine == 'x86_64' else 180  # mq_open
        assert libc.syscall(number, b'queue', os.O_CREAT | os.O_RDWR, 0o600, None) >= 0
    """,
    "opens a socket to the hypervisor": "socket.socket(40, socket.SOCK_STREAM)",
    "reads a file through the root of process 1": "open('/proc/1/root' + SECRET).read()",
    "changes the Python environment": "open(sys.prefix + '/planted.pth', 'w').write('import os')",
    "takes over a process of the user": "assert libc.ptrace(16, VICTIM, 0, 0) == 0",
    "takes a descriptor of a process": "assert libc.syscall(438, os.pidfd_open(VICTIM), 1, 0) >= 0",
    "reads the memory of a process": "open(f'/proc/{VICTIM}/mem', 'rb')",
    "reads the variables of processes": """
        texts = [path.read_bytes() for path in pathlib.Path('/proc').glob('[0-9]*/environ')
                 if os.access(path, os.R_OK)]
        assert any(CANARY.encode() in text for text in texts)
    """,
    "gets new namespaces": "assert libc.unshare(0x10000000) == 0",
    "inherits a descriptor": "os.fstat(INHERITED)",
    "finds any descriptor beyond its output": """
        def is_open(fd):
            try: return bool(os.fstat(fd))
            except OSError: return False
        assert any(map(is_open, range(3, 10_000)))
    """,
    "finds a secret in its environment": "assert CANARY in str(os.environ)",
    "becomes root": "os.setuid(0)",
    "becomes root by a setuid program": """
        import subprocess
        out = subprocess.run(['su', '-c', 'id -u'], capture_output=True, stdin=0, text=True)
        assert out.stdout.strip() == '0'
    """,
    "mounts a file system": "assert libc.mount(b'x', b'/tmp', b'tmpfs', 0, None) == 0",
    "changes its root": "os.chroot('/tmp')",
    "raises its limits": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "makes a device": "os.mknod('/tmp/disk', 0o60666, os.makedev(8, 0)); open('/tmp/disk', 'rb')",
    "opens memory or a disk": "open('/dev/mem', 'rb')",
    "writes a kernel setting": "os.open('/proc/sys/kernel/core_pattern', os.O_WRONLY)",
    "writes to the root directory": "open('/planted', 'w')",
    "replaces its own program": "open('/tmp/program.py', 'w').write('x')",
    "has more system calls by another name": """
        assert libc.syscall(425, 8, ctypes.create_string_buffer(256)) >= 0  # io_uring_setup
    """,
    "ends the first process": "os.kill(1, 9); time.sleep(0.1); assert os.getppid() != 1",
}
LIMITS = Limits(timeout_s=20, cpu_s=20, memory_mb=512, processes=16, output_kb=64, disk_mb=64)
HEADER = "import ctypes, mmap, os, pathlib, resource, socket, sys, time\nlibc = ctypes.CDLL(None)\n"


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield assignments that name servers, a file and a descriptor of the machine."""
    folder = tmp_path_factory.mktemp("machine")
    secret, unix, abstract = folder / "secret", str(folder / "unix"), f"paceline-{uuid.uuid4()}"
    secret.write_text("secret")
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("CANARY_VALUE", "canary-7391")
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        for address in (unix, f"\0{abstract}"):
            server = stack.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(address)
            server.listen()
        inherited = os.open(secret, os.O_RDONLY)
        stack.callback(os.close, inherited)
        os.dup2(inherited, 200, inheritable=True)
        stack.callback(os.close, 200)
        values = {"PORT": tcp.getsockname()[1], "UNIX": unix, "ABSTRACT": abstract}
        values |= {"SECRET": str(secret), "CANARY": "canary-7391", "INHERITED": 200}
        values |= {"HOST": socket.gethostname()}
        yield "\n".join(f"{name} = {value!r}" for name, value in values.items())
    assert secret.read_text() == "secret"


@pytest.fixture
def victim() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def attempt(names: str, victim: int, body: str) -> str:
    tried = textwrap.indent(textwrap.dedent(body).strip(), "    ")
    return (
        f"{HEADER}{names}\nVICTIM = {victim}\n"
        f"try:\n{tried}\nexcept BaseException as e:\n    print('refused:', repr(e))\n"
        "else:\n    print('ESCAPED')\n"
    )


@pytest.mark.parametrize("name", [*REAL, *OTHERS])
@pytest.mark.fault("G5", "sandboxed program {name}")
def test_program_does_not_leave_sandbox(
    names: str, victim: "subprocess.Popen[bytes]", name: str, fault: Fault
) -> None:
    result = sandbox.run(attempt(names, victim.pid, (REAL | OTHERS)[name]), timeout_s=10)
    assert result.sandbox == "bubblewrap"
    assert "ESCAPED" not in result.stdout, result
    assert "refused" in result.stdout, result
    fault.fired()
    assert "SyntaxError" not in result.stdout and "NameError" not in result.stdout, result
    assert victim.poll() is None, "the program ended a process outside"


@pytest.mark.parametrize("name", REAL)
def test_attempt_succeeds_without_sandbox(
    names: str, victim: "subprocess.Popen[bytes]", name: str
) -> None:
    result = run_weakly(attempt(names, victim.pid, REAL[name]), "", LIMITS)
    assert "ESCAPED" in result.stdout, result


@pytest.mark.fault("G5", "sandboxed program sends a datagram")
def test_datagram_does_not_arrive(fault: Fault) -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(0.1)
        port = server.getsockname()[1]
        code = f"import socket; socket.socket(type=2).sendto(b'x', ('127.0.0.1', {port}))"
        assert sandbox.run(code).ok, "nothing was sent"
        fault.fired()
        with pytest.raises(TimeoutError):
            server.recv(1)
        assert run_weakly(code, "", LIMITS).ok
        assert server.recv(1) == b"x", "it does not arrive without a sandbox either"


@pytest.mark.fault("G5", "sandboxed program is a fork bomb")
def test_fork_bomb_is_bounded_and_ends(fault: Fault) -> None:
    code = """
        import os, time
        made = 1
        for _ in range(100):
            try:
                if os.fork() == 0: time.sleep(60); os._exit(0)
                made += 1
            except BlockingIOError: break
        print(made)
    """
    before = psutil.Process().children(recursive=True)
    result = sandbox.run(textwrap.dedent(code), processes=8)
    assert result.ok and 2 <= int(result.stdout) <= 8, result
    fault.fired()
    assert psutil.Process().children(recursive=True) == before


@pytest.mark.fault("G5", "sandboxed program is a recursive fork bomb")
def test_recursive_fork_bomb_is_killed(fault: Fault) -> None:
    started = time.monotonic()
    code = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    result = sandbox.run(code, timeout_s=0.5)
    assert result.stopped == "time"
    fault.fired()
    assert time.monotonic() - started < 60


def test_memory_bomb_gets_memory_error() -> None:
    result = sandbox.run("x = []\nwhile True: x.append(bytes(10**7))", memory_mb=128)
    assert "MemoryError" in result.stderr and result.exit_code == 1


@pytest.mark.fault("G5", "sandboxed processes use all memory")
def test_memory_bomb_of_many_processes_is_killed(fault: Fault) -> None:
    code = "import os, time\nos.fork(), os.fork(), os.fork()\nx = b'x' * 60_000_000\ntime.sleep(60)"
    result = sandbox.run(code, memory_mb=200, timeout_s=30)
    assert result.stopped == "memory"
    fault.fired()


# Both leave memory in the kernel that belongs to no process.
KERNEL_BOMBS = {
    "sockets": """
        server = socket.socket(socket.AF_UNIX)
        server.bind('/tmp/server'); server.listen(4096)
        for _ in range(1000):
            with socket.socket(socket.AF_UNIX) as client:
                client.setblocking(False)
                client.connect('/tmp/server')
                with contextlib.suppress(BlockingIOError):
                    while True: client.send(bytes(10_000))
    """,
    "empty files": "for i in range(100_000): os.close(os.open(f'/tmp/{i}', os.O_CREAT))",
    "empty files beside a process that has ended": """
        if os.fork() == 0: os._exit(0)
        for i in range(100_000): os.close(os.open(f'/tmp/{i}', os.O_CREAT))
    """,
}


@pytest.mark.parametrize("name", KERNEL_BOMBS)
@pytest.mark.fault("G5", "sandboxed program fills memory with {name}")
def test_memory_bomb_in_kernel_is_killed(name: str, fault: Fault) -> None:
    code = f"import contextlib, os, socket, time\n{textwrap.dedent(KERNEL_BOMBS[name])}"
    result = sandbox.run(f"{code}\ntime.sleep(60)", memory_mb=128, timeout_s=30)
    assert result.stopped == "memory", result
    fault.fired()


@pytest.mark.fault("G5", "sandboxed program prints without end")
def test_output_bomb_is_killed(fault: Fault) -> None:
    started = time.monotonic()
    result = sandbox.run("while True: print('x' * 1000)", output_kb=10, timeout_s=100)
    assert result.truncated and len(result.stdout) == 10 * 1024
    fault.fired()
    assert time.monotonic() - started < 60, "it ran until its deadline"


@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm"])
@pytest.mark.fault("G5", "sandboxed program fills {folder}")
def test_disk_bomb_is_bounded(folder: str, fault: Fault) -> None:
    code = f"""
        import os
        total = 0
        for i in range(100):
            try:
                with open("{folder}/%d" % i, "wb", buffering=0) as f: total += f.write(bytes(10**6))
            except OSError: break
        print(total)
    """
    result = sandbox.run(textwrap.dedent(code), disk_mb=4)
    assert result.ok and 10**6 < int(result.stdout) < 5 * 2**20, result
    fault.fired()


@pytest.mark.parametrize(
    "code",
    ["while True: pass", "import time; time.sleep(100)"],
)
@pytest.mark.fault("G5", "sandboxed program ignores all signals")
def test_program_that_ignores_signals_ends_at_deadline(code: str, fault: Fault) -> None:
    header = "import signal\nfor s in set(range(1, 65)) - {9, 19, 32, 33}: signal.signal(s, 1)\n"
    started = time.monotonic()
    result = sandbox.run(header + code, timeout_s=0.3)
    assert result.timed_out and result.exit_code == 137
    fault.fired()
    assert time.monotonic() - started < 60


def test_program_that_only_computes_ends_at_its_cpu_limit() -> None:
    result = sandbox.run("while True: pass", timeout_s=60, cpu_s=1)
    assert result.stopped == "cpu" and not result.ok


@pytest.mark.parametrize("ending", ["", "time.sleep(60)"])
def test_daemon_does_not_outlive_program(ending: str) -> None:
    name = f"daemon-{uuid.uuid4()}"
    code = f"""
        import os, sys, time
        started, failed = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for fd in range(3): os.close(fd)
                try: os.execv(sys.executable, ["{name}", "-c", "import time; time.sleep(100)"])
                finally: os.write(failed, b"failed")
            os._exit(0)
        os.close(failed)
        print(os.read(started, 9))  # ends when the daemon is another program
        {ending}
    """
    result = sandbox.run(textwrap.dedent(code), timeout_s=0.5 if ending else 60)
    assert ending or result.stdout == "b''\n", "no daemon was started"
    deadline = time.monotonic() + 30
    while name in _command_lines() and time.monotonic() < deadline:
        time.sleep(0.01)  # the kernel ends it after the process that it waits for
    assert name not in _command_lines()


def test_run_leaves_no_descriptor_or_process() -> None:
    sandbox.run("pass")
    before = os.listdir("/proc/self/fd"), psutil.Process().children(recursive=True)
    for code in ("pass", "1 / 0", "import os; os.kill(os.getpid(), 9)", "while True: pass"):
        sandbox.run(code, timeout_s=0.2)
    assert (os.listdir("/proc/self/fd"), psutil.Process().children(recursive=True)) == before


def _command_lines() -> str:
    found = []
    for process in psutil.process_iter():
        try:
            found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return "\n".join(found)


def test_limits_of_caller_are_unchanged() -> None:
    before = [resource.getrlimit(kind) for kind in range(10)]
    sandbox.run("pass")
    assert [resource.getrlimit(kind) for kind in range(10)] == before


@pytest.mark.parametrize(
    "code",
    [
        "import numpy; print(numpy.arange(5).sum())",
        "import torch; print(int(torch.arange(5).share_memory_().sum()))",
        "import multiprocessing as m; print(sum(m.Pool(2).map(abs, [-4, 6])))",
        "import multiprocessing as m; v = m.Value('i', 9); v.value += 1; print(v.value)",
        "import socket; print(len([socket.socketpair() for _ in range(10)]))",
        "import mmap; print(len(mmap.mmap(-1, 10, flags=mmap.MAP_PRIVATE)))",
    ],
)
def test_libraries_work_in_sandbox(code: str) -> None:
    result = sandbox.run(code, memory_mb=8192, timeout_s=60)
    assert result.stdout == "10\n", result


def test_program_uses_packages_of_environment() -> None:
    result = sandbox.run("import numpy, sys; print(numpy.arange(3).sum(), sys.prefix)")
    assert result.stdout == f"3 {sys.prefix}\n", result


@pytest.mark.parametrize("kind", ["memory file", "event", "pipe"])
def test_search_for_descriptors_finds_inherited_one(names: str, kind: str) -> None:
    with ExitStack() as stack:
        if kind == "pipe":
            fd, other = os.pipe()
            stack.callback(os.close, other)
        else:
            fd = os.memfd_create("leaked") if kind == "memory file" else os.eventfd(0)
        stack.callback(os.close, fd)
        code = attempt(names, 0, OTHERS["finds any descriptor beyond its output"])
        result = subprocess.run(
            [sys.executable, "-c", code], pass_fds=[fd], capture_output=True, text=True
        )
    assert "ESCAPED" in result.stdout, result
