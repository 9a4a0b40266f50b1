"""Reward functions that misbehave, and short ways to open and call rewards in tests."""

import asyncio
import os
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from paceline.reward.pool import ProcessReward
from paceline.reward.reward import Reward, RewardSettings, open_reward
from paceline.types import Prompt, Trajectory
from tests.event_loops import in_loop as in_loop

HEADER = """
import asyncio, sys, time
from paceline.reward.reward import RewardSettings, open_reward
from paceline.types import Prompt, Trajectory
"""
FUNCTIONS = textwrap.dedent("""
    import asyncio, atexit, ctypes, math, os, pathlib, signal, subprocess, sys, time

    def good(completion, row): return len(completion) + row["bonus"]
    def true(completion, row): return True
    def raising(completion, row):
        return int("x" + completion)
    def exiting(completion, row): sys.exit("bye")
    def none(completion, row): pass
    def nan(completion, row): return math.nan
    def inf(completion, row): return -math.inf
    def huge(completion, row): return 10 ** 400
    def text(completion, row): return "1.0"
    def array(completion, row): return [1.0]
    async def coroutine(completion, row): return 1.0
    def components(completion, row):
        return {"score": 0.5, "format": True, "found": "42", "length": len(completion)}
    def no_reward(completion, row): return {"format": 1.0}
    def generator(completion, row): yield 1.0
    def for_trl(prompts, completions, **kwargs): return [1.0]
    def for_verl(data_source, solution_str, ground_truth, extra_info=None): return 1.0
    class Scorer:
        def __init__(self): self.seen = 0
        def __call__(self, completion, row):
            self.seen += 1
            return self.seen
    def dying(completion, row): os._exit(3)
    def crashing(completion, row): os.kill(os.getpid(), signal.SIGSEGV)
    def printing(completion, row):
        print("hello from the reward"); print("x" * 100_000); os.write(1, b"raw\\n"); return 0.5
    def sleeping(completion, row): time.sleep(600)
    def looping(completion, row):
        while True: pass
    def holding_the_gil(completion, row): ctypes.PyDLL(None).sleep(600)
    def suspending(completion, row): os.kill(os.getpid(), signal.SIGSTOP)
    def spawning(completion, row):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for session in (False, True):
            sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
            child = subprocess.Popen(sleep, start_new_session=session)
            with open(row["pids"], "a") as f: f.write(f"{child.pid}\\n")
        time.sleep(600)
    def daemon(completion, row, chain=False):
        if os.fork() == 0:  # the child ends at once, so that its child is an orphan
            os.setsid()
            while os.fork() == 0:
                with open(row["pids"], "a") as f: f.write(f"{os.getpid()}\\n")
                time.sleep(0.01 if chain else 600)
            os._exit(0)
        os.wait()
        while not os.path.exists(row["pids"]): time.sleep(0.01)
        if completion == "die": os._exit(3)
        return 1.0
    def chain_of_daemons(completion, row): return daemon(completion, row, chain=True)
    def sometimes(completion, row):
        if completion == "hang": time.sleep(600)
        return 1.0
    def pid(completion, row): return os.getpid()
    def slow(completion, row): time.sleep(0.8); return 1.0
    def hanging_once(completion, row):
        if not os.path.exists(row["hangs"]):
            open(row["hangs"], "w").close(); time.sleep(600)
        return 1.0
    def writing(completion, row):
        global log
        log = open(row["log"], "a"); log.write("scored"); return 1.0
    def meeting_at_exit(completion, row): return 1.0
    def meet():  # return once two processes are in this function
        here = pathlib.Path(__file__).parent
        (here / f"exiting.{os.getpid()}").touch()
        while len(list(here.glob("exiting.*"))) < 2: time.sleep(0.01)
        (here / f"met.{os.getpid()}").touch()
    if "meeting_at_exit" in sys.argv[-1]: atexit.register(meet)
    def changing_row(completion, row):
        row["bonus"] += 1
        return row["bonus"] - 1
    def allocating(completion, row): return len(bytearray(100_000_000)) / 1e8
    async def waiting(completion, row): await asyncio.sleep(0.5); return 1.0
    def returning_coroutine(completion, row): return waiting(completion, row)
    class Client:
        def __init__(self):
            self.loop, self.lock, self.seen = asyncio.get_running_loop(), asyncio.Lock(), 0
        async def __call__(self, completion, row):
            async with self.lock:
                assert asyncio.get_running_loop() is self.loop
                await asyncio.sleep(0)
                self.seen += 1
                return self.seen
    class Broken:
        def __init__(self): raise KeyError("no key")
        async def __call__(self, completion, row): ...
    async def mixed(completion, row):
        if completion == "late": await asyncio.sleep(600)
        if completion == "block": time.sleep(600)
        if completion == "raise": raise ValueError("wrong")
        if completion == "cancel": raise asyncio.CancelledError
        if completion == "time out": raise TimeoutError("judge")
        if completion == "exit": os._exit(3)
        while completion == "stubborn":
            try: await asyncio.sleep(600)
            except asyncio.CancelledError: pass
        await asyncio.sleep(0.01)
        return 1.0
    number = 3
    def one_argument(completion): return 1.0
""")


def write_functions(directory: Path) -> Path:
    file = directory / "my_rewards.py"
    file.write_text(FUNCTIONS)
    return file


@asynccontextmanager
async def opened(function: str, **settings: Any) -> AsyncIterator[ProcessReward]:
    reward = await open_reward(
        RewardSettings(function=function, **{"timeout_s": 20.0, **settings}), task=None
    )
    assert isinstance(reward, ProcessReward)
    try:
        yield reward
    finally:
        pids = reward.pids
        await reward.close()
        assert not any(alive(pid) for pid in pids)


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        if not Path("/proc").exists():
            return os.kill(pid, 0) is None
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


def run_program(body: str, **options: Any) -> "subprocess.Popen[str]":
    """Start a program with the imports it needs to open a reward, and `main` to be defined."""
    program = HEADER + textwrap.dedent(body) + "\nasyncio.run(main())"
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        **options,
    )


def score(reward: Reward, *completions: str, **row: object) -> Coroutine[Any, Any, list[float]]:
    prompt = Prompt("q7", (1,), "question", {"bonus": 1, **row})
    return reward.score(prompt, [Trajectory((), text) for text in completions])
