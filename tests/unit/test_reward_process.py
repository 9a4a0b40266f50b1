"""Custom reward functions: any behavior yields a number or a clear error and leaves no process."""

import asyncio
import functools
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.errors import ConfigError, DataError, RewardError
from paceline.reward.process import ProcessReward
from paceline.reward.reward import BuiltinReward, Reward, RewardSettings, open_reward
from paceline.reward.worker import RewardFunctionError, as_reward
from paceline.types import Prompt, Trajectory
from tests.processes import children

Test = Callable[..., Coroutine[Any, Any, None]]


def in_loop(test: Test) -> Callable[..., None]:
    """Run an async test in a new event loop."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        asyncio.run(test(**arguments))

    return run


FUNCTIONS = textwrap.dedent("""
    import atexit, ctypes, math, os, signal, subprocess, sys, time

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
    def sometimes(completion, row):
        if completion == "hang": time.sleep(600)
        return 1.0
    def pid(completion, row): return os.getpid()
    def slow(completion, row): time.sleep(1.5); return 1.0
    def writing(completion, row):
        global log
        log = open(row["log"], "a"); log.write("scored"); return 1.0
    def slow_to_exit(completion, row): return 1.0
    if "slow_to_exit" in sys.argv[-1]: atexit.register(time.sleep, 0.5)
    number = 3
    def one_argument(completion): return 1.0
""")


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rewards") / "my_rewards.py"
    file.write_text(FUNCTIONS)
    return file


@asynccontextmanager
async def opened(function: str, **settings: float) -> AsyncIterator[ProcessReward]:
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
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.02)


def score(reward: Reward, *completions: str, **row: object) -> Coroutine[Any, Any, list[float]]:
    prompt = Prompt("q7", (1,), "question", {"bonus": 1, **row})
    return reward.score(prompt, [Trajectory((), text) for text in completions])


@in_loop
async def test_rewards_are_returned_in_order(functions: Path) -> None:
    async with opened(f"{functions}:good") as reward:
        assert await score(reward, "a", "bbb", "") == [2.0, 4.0, 1.0]


@pytest.mark.parametrize(
    ("name", "rewards"),
    [
        ("coroutine", [1.0, 1.0]),
        ("Scorer", [1.0, 2.0]),  # one instance scores all completions
        ("true", [1.0, 1.0]),
        (
            "components",
            [
                {"reward": 0.5, "format": 1.0, "length": 1.0},
                {"reward": 0.5, "format": 1.0, "length": 2.0},
            ],
        ),
    ],
)
@in_loop
async def test_reward_may_be_async_or_class_or_return_bool_or_dict(
    functions: Path, name: str, rewards: list[Any]
) -> None:
    async with opened(f"{functions}:{name}") as reward:
        assert await score(reward, "a", "bb") == rewards


def test_as_reward_accepts_only_scalars_of_numpy_and_torch() -> None:
    values = [
        np.float32(0.5),
        np.int64(2),
        np.True_,
        np.array(1.5),
        torch.tensor(0.25),
        torch.tensor(True),
    ]
    assert [as_reward(value) for value in values] == [0.5, 2.0, 1.0, 1.5, 0.25, 1.0]
    for value in (
        np.array([1.5]),
        torch.tensor([1.5]),
        torch.tensor(1j),
        np.array("text"),
        np.float32("nan"),
    ):
        with pytest.raises(RewardFunctionError, match="expected a"):
            as_reward(value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raising", r"raised ValueError: invalid literal for int\(\).*'xa' \(.*my_rewards\.py:7\)"),
        ("exiting", "raised SystemExit: bye"),
        ("none", r"returned None \(NoneType\); expected a number"),
        ("nan", r"returned nan \(float\); expected a finite number"),
        ("inf", r"returned -inf \(float\); expected a finite number"),
        ("huge", r"returned 10{190}.*\(int\); expected a finite number"),
        ("text", r"returned '1\.0' \(str\); expected a number"),
        ("array", r"returned \[1\.0\] \(list\); expected a number"),
        ("no_reward", r"returned {'format': 1\.0}; a dict needs a 'reward'"),
        ("dying", "its process ended with exit code 3"),
        ("crashing", "its process ended with signal SIGSEGV"),
    ],
)
@in_loop
async def test_score_raises_error_that_names_function_and_prompt(
    functions: Path, name: str, message: str
) -> None:
    async with opened(f"{functions}:{name}") as reward:
        for _ in range(2):  # the second call shows that the worker survived or was replaced
            with pytest.raises(
                RewardError, match=rf"my_rewards\.py:{name}', prompt 'q7': .*{message}"
            ):
                await score(reward, "a")
        assert len(reward.pids) == 1


@pytest.mark.parametrize("name", ["sleeping", "looping", "holding_the_gil", "suspending"])
@in_loop
async def test_worker_is_killed_when_call_exceeds_deadline(functions: Path, name: str) -> None:
    async with opened(f"{functions}:{name}", timeout_s=0.5) as reward:
        before = reward.pids
        async with asyncio.timeout(10):
            with pytest.raises(RewardError, match=rf"{name}', prompt 'q7': no reply within 0.5 s"):
                await score(reward, "a")
        assert not alive(before[0])
        assert len(reward.pids) == 1


@in_loop
async def test_group_is_scored_again_when_worker_is_killed(
    functions: Path,
) -> None:
    async with opened(f"{functions}:slow", timeout_s=20) as reward:
        (before,) = reward.pids
        call = asyncio.ensure_future(score(reward, "a"))
        await asyncio.sleep(0.5)
        os.kill(before, signal.SIGKILL)
        assert await call == [1.0]
        assert reward.pids != [before]


def test_deadline_excludes_time_while_run_is_suspended(functions: Path) -> None:
    program = textwrap.dedent(f"""
        import asyncio
        from paceline.reward.reward import RewardSettings, open_reward
        from paceline.types import Prompt, Trajectory
        async def main():
            settings = RewardSettings(function={f"{functions}:slow"!r}, timeout_s=3)
            reward = await open_reward(settings, None)
            scoring = reward.score(Prompt("q", (1,), "", {{}}), [Trajectory((), "a")])
            call = asyncio.ensure_future(scoring)
            await asyncio.sleep(0.2)
            print(*reward.pids, flush=True)
            print(await call, flush=True)
            await reward.close()
        asyncio.run(main())
    """)
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    ) as parent:
        assert parent.stdout is not None
        both = [parent.pid, int(parent.stdout.readline())]
        # The suspension is longer than the timeout.
        for signal_number, seconds in ((signal.SIGSTOP, 4), (signal.SIGCONT, 0)):
            for pid in both:
                os.kill(pid, signal_number)
            time.sleep(seconds)
        assert parent.stdout.read() == "[1.0]\n"


@pytest.mark.skipif(
    sys.platform != "linux", reason="descendants outside the process group are found through /proc"
)
@in_loop
async def test_descendants_are_killed_with_hanging_worker(functions: Path, tmp_path: Path) -> None:
    async with opened(f"{functions}:spawning", timeout_s=2.0) as reward:
        with pytest.raises(RewardError, match="no reply within 2 s"):
            await score(reward, "a", pids=str(tmp_path / "pids"))
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    await until(lambda: not any(alive(pid) for pid in pids))


@in_loop
async def test_pool_keeps_configured_number_of_workers_after_hangs(
    functions: Path,
) -> None:
    async with opened(f"{functions}:sometimes", timeout_s=0.2, workers=2) as reward:
        first = set(reward.pids)
        results = await asyncio.gather(
            *(score(reward, "hang") for _ in range(20)), return_exceptions=True
        )
        assert all(isinstance(r, RewardError) for r in results)
        assert len(reward.pids) == 2
        assert all(map(alive, reward.pids))
        assert not any(map(alive, first))
        assert await score(reward, "fine") == [1.0]


@in_loop
async def test_event_loop_runs_while_reward_computes(functions: Path) -> None:
    async with opened(f"{functions}:sleeping", timeout_s=0.5) as reward:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        with pytest.raises(RewardError):
            await score(reward, "a")
        ticking.cancel()
        assert ticks > 10


@in_loop
async def test_groups_are_scored_by_all_workers(functions: Path) -> None:
    async with opened(f"{functions}:pid", workers=2) as reward:
        rewards = await asyncio.gather(*(score(reward, "a") for _ in range(40)))
        assert {int(r) for (r,) in rewards} == set(reward.pids)


@in_loop
async def test_prints_of_function_go_to_log(
    functions: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="paceline.reward.process"):
        async with opened(f"{functions}:printing") as reward:
            assert await score(reward, "a", "b") == [0.5, 0.5]
            await until(lambda: "hello from the reward" in caplog.text and "raw" in caplog.text)


@in_loop
async def test_close_lets_function_flush_its_files(functions: Path, tmp_path: Path) -> None:
    async with opened(f"{functions}:writing") as reward:
        await score(reward, "a", log=str(tmp_path / "log"))
    assert (tmp_path / "log").read_text() == "scored"


@in_loop
async def test_close_ends_call_in_flight(functions: Path) -> None:
    async with opened(f"{functions}:sleeping", timeout_s=600) as reward:
        call = asyncio.ensure_future(score(reward, "a"))
        await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await reward.close()
            with pytest.raises(RewardError):
                await call
    with pytest.raises(RewardError, match="closed"):
        await score(reward, "a")


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere a busy worker notices only between two calls"
)
@pytest.mark.parametrize("name", ["looping", "holding_the_gil", "good"])
@in_loop
async def test_workers_end_when_parent_is_killed(functions: Path, name: str) -> None:
    program = textwrap.dedent(f"""
        import asyncio
        from paceline.reward.reward import RewardSettings, open_reward
        from paceline.types import Prompt, Trajectory
        async def main():
            settings = RewardSettings(function={f"{functions}:{name}"!r}, timeout_s=600)
            reward = await open_reward(settings, None)
            print(*reward.pids, flush=True)
            await reward.score(Prompt("q", (1,), "", {{"bonus": 1}}), [Trajectory((), "a")])
            await asyncio.sleep(600)
        asyncio.run(main())
    """)
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
    ) as parent:
        assert parent.stdout is not None
        worker = int(await asyncio.to_thread(parent.stdout.readline))
        assert alive(worker)
        parent.send_signal(signal.SIGKILL)
    await until(lambda: not alive(worker))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no_such_module:f", "no module 'no_such_module'; searched .*"),
        ("no/such/file.py:f", r"no file 'no/such/file\.py' \(relative paths start at "),
        ("{file}:gud", "no 'gud' in .*my_rewards.py; it defines good, true"),
        ("{file}:number", "'number' in .*my_rewards.py is int, not a function"),
        (
            "{file}:one_argument",
            r"one_argument\(completion\) cannot be called as reward\(completion, row\)",
        ),
        (
            "{file}:generator",
            "'generator' is a generator; expected a function that returns a number",
        ),
        (
            "{file}:for_trl",
            r"written for TRL; .* reward\(completion, row\)\. Wrap it: "
            r".*return for_trl\(completions=\[completion\], \*\*row\)\[0\]",
        ),
        (
            "{file}:for_verl",
            r'written for verl; .* for_verl\(row\["data_source"\], completion, .*ground_truth',
        ),
        (
            "{file}:Scorer.__call__",
            r"cannot be called as reward\(completion, row\), where row is the dataset row",
        ),
        ("{wrong}:f", r"importing it raised SyntaxError: .* \(.*wrong\.py:2\)"),
        (
            "{broken}:f",
            r"importing it raised NameError: name 'oops' is not defined \(.*broken\.py:2\)",
        ),
        (
            "last_nubmer",
            "neither a verifier nor an entry point of 'paceline.rewards'; "
            "did you mean 'last_number'?",
        ),
    ],
)
@in_loop
async def test_open_reward_raises_when_function_cannot_be_loaded(
    functions: Path, function: str, message: str
) -> None:
    broken = functions.with_name("broken.py")
    broken.write_text("import os\noops\n")
    wrong = functions.with_name("wrong.py")
    wrong.write_text("import os\ndef f(completion, row:\n")
    with pytest.raises(ConfigError, match=rf"reward\.function = .*{message}"):
        await open_reward(
            RewardSettings(
                function=function.format(file=functions, broken=broken, wrong=wrong), workers=2
            ),
            task=None,
        )


@pytest.mark.skipif(sys.platform != "linux", reason="open files are counted through /proc")
@in_loop
async def test_open_reward_raises_when_processes_cannot_be_started(
    functions: Path,
) -> None:
    before, limits = children(), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, limits[1]))
    try:
        with pytest.raises(
            RewardError,
            match=r"my_rewards\.py:good': could not start a process in addition to \d+ others: "
            r".*Too many open files",
        ):
            await open_reward(RewardSettings(function=f"{functions}:good", workers=40), task=None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert children() == before


@in_loop
async def test_reward_may_be_function_of_module(
    functions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(functions.parent))
    async with opened("my_rewards:good") as reward:
        assert await score(reward, "aa") == [3.0]


@in_loop
async def test_callable_reward_may_be_async() -> None:
    async def scorer(completion: str, row: Mapping[str, Any]) -> dict[str, float]:
        await asyncio.sleep(0 if completion else 600)
        return {"reward": len(completion), "bonus": row["bonus"]}

    reward = await open_reward(RewardSettings(timeout_s=0.2), None, scorer)
    assert await score(reward, "a", "bb") == [
        {"reward": 1.0, "bonus": 1.0},
        {"reward": 2.0, "bonus": 1.0},
    ]
    with pytest.raises(RewardError, match=r"scorer', prompt .*no reply within 0\.2 s"):
        await score(reward, "a", "")


@in_loop
async def test_callable_reward_takes_precedence_over_settings() -> None:
    def inverse(completion: str, row: Mapping[str, Any]) -> float:
        return 1 / len(completion)

    reward = await open_reward(RewardSettings(function="exact"), None, inverse)
    assert await score(reward, "ab") == [0.5]
    with pytest.raises(RewardError, match=r"inverse', prompt .*raised ZeroDivisionError"):
        await score(reward, "")


@in_loop
async def test_open_reward_uses_task_score_by_default() -> None:
    reward = await open_reward(RewardSettings(), task="sort:3")
    assert isinstance(reward, BuiltinReward)
    assert await score(reward, "123", "999", answer="123") == [1.0, 0.0]
    with pytest.raises(
        RewardError, match=r"reward 'sort:3', prompt 'q7': raised KeyError: 'answer'"
    ):
        await score(reward, "123")
    await reward.close()


@in_loop
async def test_open_reward_finds_verifier_by_name() -> None:
    reward = await open_reward(RewardSettings(function="last_number"), task=None)
    assert await score(reward, "it is 7", answer="#### 7") == [1.0]
    async with opened("regex") as reward:
        assert await score(reward, "A: 7", pattern=r"A: (\d)", answer="7") == [1.0]


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("exact", {}, "the row has no 'answer' to compare with"),
        ("boxed", {"answer": None}, "the row has no 'answer' to compare with"),
        ("tagged", {"answer": ["a", "b"]}, r"row\['answer'\] is list; expected text or a number"),
        ("last_number", {"answer": "none"}, "contains no number"),
    ],
)
@in_loop
async def test_check_names_row_that_cannot_be_scored(
    name: str, row: dict[str, Any], message: str
) -> None:
    reward = await open_reward(RewardSettings(function=name), task=None)
    assert isinstance(reward, BuiltinReward)
    reward.check([("a.jsonl:1", {"answer": "1"})])
    with pytest.raises(
        DataError,
        match=rf"a\.jsonl:2 cannot be scored with reward\.function = '{name}': .*{message}",
    ):
        reward.check([("a.jsonl:1", {"answer": "1"}), ("a.jsonl:2", row)])


@in_loop
async def test_open_reward_raises_without_reward_for_data_files() -> None:
    with pytest.raises(ConfigError, match=r"need reward\.function"):
        await open_reward(RewardSettings(), task=None)


@in_loop
async def test_close_ends_many_workers_concurrently(functions: Path) -> None:
    async with opened(f"{functions}:slow_to_exit", workers=12) as reward:
        begun = time.monotonic()
        await reward.close()
        assert time.monotonic() - begun < 6, "each worker takes half a second to exit"
