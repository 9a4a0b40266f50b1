"""The channel of a reward process: programs that a reward function starts cannot write to it."""

import asyncio
import sys
import textwrap
from pathlib import Path

import pytest

from tests.fault_report import Fault
from tests.scoring import in_loop, opened, score

# Answers every call with 777, over every descriptor that the program has or can take.
FORGERY = """
    import ctypes, json, os, sys
    lines = "".join(json.dumps({"number": n, "reward": 777.0}) + "\\n" for n in range(20)).encode()

    def forge():
        for fd in range(3, 1024):
            try: os.write(fd, lines)
            except OSError: pass

    def take_from(pid):  # pidfd_open and pidfd_getfd
        libc = ctypes.CDLL(None)
        process = libc.syscall(434, pid, 0)
        for fd in range(3, 64):
            libc.syscall(438, process, fd, 0)
        forge()

    def give_up_ptrace():  # root may read every process; a user, or root in a container, may not
        libc, sets = ctypes.CDLL(None), (ctypes.c_uint32 * 6)()
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        libc.prctl(24, 19, 0, 0, 0)  # out of the bounding set, for programs
        libc.capget(header, sets)
        for i in range(3):
            sets[i] &= ~(1 << 19)
        libc.capset(header, sets)
"""
REWARDS = """
    import multiprocessing, os, subprocess, sys
    from pathlib import Path
    sys.path.insert(0, str(Path(__file__).parent))
    import forgery

    PROGRAM = [sys.executable, str(Path(__file__).parent / "forgery.py")]

    def system(completion, row): os.system(" ".join(PROGRAM)); return 0.0
    def keeping_descriptors(completion, row):
        subprocess.run(PROGRAM, close_fds=False); return 0.0
    def forked(completion, row):
        if (pid := os.fork()) == 0:
            if (grandchild := os.fork()) != 0: os.waitpid(grandchild, 0)
            forgery.forge(); os._exit(0)
        os.waitpid(pid, 0); return 0.0
    def multiprocess(completion, row):
        child = multiprocessing.get_context("fork").Process(target=forgery.forge)
        child.start(); child.join(); return 0.0
    def taking(completion, row):
        forgery.give_up_ptrace()
        subprocess.run([*PROGRAM, str(os.getpid())]); return 0.0
    async def asynchronous(completion, row): os.system(" ".join(PROGRAM)); return 0.0
"""
MAIN = """
    if __name__ == "__main__":
        if len(sys.argv) > 1:
            take_from(int(sys.argv[1]))
        else:
            forge()
"""


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("channel")
    (folder / "forgery.py").write_text(textwrap.dedent(FORGERY) + textwrap.dedent(MAIN))
    (folder / "rewards.py").write_text(textwrap.dedent(REWARDS))
    return folder / "rewards.py"


@pytest.mark.parametrize(
    "name",
    ["system", "keeping_descriptors", "forked", "multiprocess", "asynchronous"],
)
@in_loop
@pytest.mark.fault("G5", "child process of a reward function writes a reward: {name}")
async def test_child_of_reward_function_cannot_set_reward(
    rewards: Path, name: str, fault: Fault
) -> None:
    async with opened(f"{rewards}:{name}") as reward:
        first = await score(reward, "a", "b", "c")
        async with asyncio.timeout(60):
            assert first + await score(reward, "a", "b") == [0.0] * 5
        fault.fired()


@pytest.mark.skipif(sys.platform != "linux", reason="pidfd_getfd is a system call of Linux")
@in_loop
async def test_child_cannot_take_channel_out_of_process(rewards: Path) -> None:
    async with opened(f"{rewards}:taking") as reward:
        assert await score(reward, "a", "b", "c") == [0.0] * 3
