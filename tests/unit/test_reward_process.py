"""A user's reward function: whatever it does, the run gets a number or a clear error, and no process is left over."""

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
    """Run an async test in an event loop of its own."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        asyncio.run(test(**arguments))

    return run


FUNCTIONS = textwrap.dedent("""
    import atexit, ctypes, math, os, signal, subprocess, sys, time

    def good(answer, row): return len(answer) + row["bonus"]
    def true(answer, row): return True
    def raising(answer, row):
        return int("x" + answer)
    def exiting(answer, row): sys.exit("bye")
    def none(answer, row): pass
    def nan(answer, row): return math.nan
    def inf(answer, row): return -math.inf
    def huge(answer, row): return 10 ** 400
    def text(answer, row): return "1.0"
    def array(answer, row): return [1.0]
    async def coroutine(answer, row): return 1.0
    def parts(answer, row): return {"score": 0.5, "format": True, "found": "42", "length": len(answer)}
    def no_reward(answer, row): return {"format": 1.0}
    def generator(answer, row): yield 1.0
    def for_trl(prompts, completions, **kwargs): return [1.0]
    def for_verl(data_source, solution_str, ground_truth, extra_info=None): return 1.0
    class Judge:
        def __init__(self): self.seen = 0
        def __call__(self, answer, row):
            self.seen += 1
            return self.seen
    def dying(answer, row): os._exit(3)
    def crashing(answer, row): os.kill(os.getpid(), signal.SIGSEGV)
    def printing(answer, row):
        print("hello from the reward"); print("x" * 100_000); os.write(1, b"raw\\n"); return 0.5
    def sleeping(answer, row): time.sleep(600)
    def looping(answer, row):
        while True: pass
    def holding_the_gil(answer, row): ctypes.PyDLL(None).sleep(600)
    def stopping(answer, row): os.kill(os.getpid(), signal.SIGSTOP)
    def unkind(answer, row):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for session in (False, True):
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=session)
            with open(row["pids"], "a") as f: f.write(f"{child.pid}\\n")
        time.sleep(600)
    def sometimes(answer, row):
        if answer == "hang": time.sleep(600)
        return 1.0
    def pid(answer, row): return os.getpid()
    def slow(answer, row): time.sleep(1.5); return 1.0
    def writing(answer, row):
        global log
        log = open(row["log"], "a"); log.write("scored"); return 1.0
    def slow_to_leave(answer, row): return 1.0
    if "slow_to_leave" in sys.argv[-1]: atexit.register(time.sleep, 0.5)
    number = 3
    def one_argument(answer): return 1.0
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
    """Whether a process runs; one that is dead but not yet collected by its parent does not."""
    try:
        return (
            "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
            if Path("/proc").exists()
            else os.kill(pid, 0) is None
        )
    except (FileNotFoundError, ProcessLookupError):
        return False


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.02)


def send_command(reward: Reward, *answers: str, **row: object) -> Coroutine[Any, Any, list[float]]:
    prompt = Prompt("q7", (1,), "question", {"bonus": 1, **row})
    return reward.score(prompt, [Trajectory((), answer) for answer in answers])


@in_loop
async def test_numbers_come_back_in_order(functions: Path) -> None:
    async with opened(f"{functions}:good") as reward:
        assert await send_command(reward, "a", "bbb", "") == [2.0, 4.0, 1.0]


@in_loop
async def test_a_reward_may_be_async_a_class_or_give_its_parts(functions: Path) -> None:
    async with opened(f"{functions}:coroutine") as reward:
        assert await send_command(reward, "a", "b") == [1.0, 1.0]
    async with opened(f"{functions}:Judge") as reward:
        assert await send_command(reward, "a", "b") == [1.0, 2.0]  # one judge for all answers
    async with opened(f"{functions}:parts") as reward:
        assert await send_command(reward, "abc") == [{"reward": 0.5, "format": 1.0, "length": 3.0}]
    async with opened(f"{functions}:no_reward") as reward:
        with pytest.raises(RewardError, match="a dict needs a 'reward'"):
            await send_command(reward, "a")


@in_loop
async def test_a_truth_value_is_a_number(functions: Path) -> None:
    async with opened(f"{functions}:true") as reward:
        assert await send_command(reward, "a") == [1.0]


def test_numbers_of_numpy_and_torch_are_numbers_but_arrays_of_them_are_not() -> None:
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
        (
            "raising",
            r"raised ValueError: invalid literal for int\(\) with base 10: 'xa' \(.*my_rewards\.py:7\)",
        ),
        ("exiting", "raised SystemExit: bye"),
        ("none", r"returned None \(NoneType\); expected a number"),
        ("nan", r"returned nan \(float\); expected a finite number"),
        ("inf", r"returned -inf \(float\); expected a finite number"),
        ("huge", r"returned 10{190}.*\(int\); expected a finite number"),
        ("text", r"returned '1\.0' \(str\); expected a number"),
        ("array", r"returned \[1\.0\] \(list\); expected a number"),
        ("dying", "its process ended with exit code 3"),
        ("crashing", "its process ended with signal SIGSEGV"),
    ],
)
@in_loop
async def test_anything_but_a_number_is_an_error_that_names_function_and_prompt(
    functions: Path, name: str, message: str
) -> None:
    async with opened(f"{functions}:{name}") as reward:
        for _ in range(2):  # the second time shows that the worker is still there, or replaced
            with pytest.raises(
                RewardError, match=rf"my_rewards\.py:{name}', prompt 'q7': .*{message}"
            ):
                await send_command(reward, "a")
        assert len(reward.pids) == 1


@pytest.mark.parametrize("name", ["sleeping", "looping", "holding_the_gil", "stopping"])
@in_loop
async def test_a_hang_is_killed_at_the_deadline(functions: Path, name: str) -> None:
    async with opened(f"{functions}:{name}", timeout_s=0.5) as reward:
        before = reward.pids
        async with asyncio.timeout(10):
            with pytest.raises(RewardError, match=rf"{name}', prompt 'q7': no answer within 0.5 s"):
                await send_command(reward, "a")
        assert not alive(before[0])
        assert len(reward.pids) == 1


@in_loop
async def test_a_worker_that_somebody_kills_is_replaced_and_its_group_is_scored_again(
    functions: Path,
) -> None:
    async with opened(f"{functions}:slow", timeout_s=20) as reward:
        (before,) = reward.pids
        call = asyncio.ensure_future(send_command(reward, "a"))
        await asyncio.sleep(0.5)
        os.kill(before, signal.SIGKILL)
        assert await call == [1.0]
        assert reward.pids != [before]


def test_no_time_of_a_reward_passes_while_the_run_is_stopped(functions: Path) -> None:
    program = textwrap.dedent(f"""
        import asyncio
        from paceline.reward.reward import RewardSettings, open_reward
        from paceline.types import Prompt, Trajectory
        async def main():
            reward = await open_reward(RewardSettings(function={f"{functions}:slow"!r}, timeout_s=3), None)
            call = asyncio.ensure_future(reward.score(Prompt("q", (1,), "", {{}}), [Trajectory((), "a")]))
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
        for signal_number, seconds in (
            (signal.SIGSTOP, 4),
            (signal.SIGCONT, 0),
        ):  # for longer than it may take
            for pid in both:
                os.kill(pid, signal_number)
            time.sleep(seconds)
        assert parent.stdout.read() == "[1.0]\n"


@pytest.mark.skipif(
    sys.platform != "linux", reason="descendants outside the process group are found through /proc"
)
@in_loop
async def test_the_processes_a_hanging_reward_started_go_with_it(
    functions: Path, tmp_path: Path
) -> None:
    async with opened(f"{functions}:unkind", timeout_s=2.0) as reward:
        with pytest.raises(RewardError, match="no answer within 2 s"):
            await send_command(reward, "a", pids=str(tmp_path / "pids"))
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    await until(lambda: not any(alive(pid) for pid in pids))


@in_loop
async def test_twenty_hangs_in_a_row_leave_the_configured_number_of_workers(
    functions: Path,
) -> None:
    async with opened(f"{functions}:sometimes", timeout_s=0.2, workers=2) as reward:
        first = set(reward.pids)
        results = await asyncio.gather(
            *(send_command(reward, "hang") for _ in range(20)), return_exceptions=True
        )
        assert all(isinstance(r, RewardError) for r in results)
        assert len(reward.pids) == 2
        assert all(map(alive, reward.pids))
        assert not any(map(alive, first))
        assert await send_command(reward, "fine") == [1.0]


@in_loop
async def test_the_event_loop_goes_on_while_a_reward_thinks(functions: Path) -> None:
    async with opened(f"{functions}:sleeping", timeout_s=0.5) as reward:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        with pytest.raises(RewardError):
            await send_command(reward, "a")
        ticking.cancel()
        assert ticks > 10


@in_loop
async def test_groups_are_scored_by_all_workers_at_once(functions: Path) -> None:
    async with opened(f"{functions}:pid", workers=2) as reward:
        rewards = await asyncio.gather(*(send_command(reward, "a") for _ in range(40)))
        assert {int(r) for (r,) in rewards} == set(reward.pids)


@in_loop
async def test_prints_go_to_the_log_and_break_nothing(
    functions: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="paceline.reward.process"):
        async with opened(f"{functions}:printing") as reward:
            assert await send_command(reward, "a", "b") == [0.5, 0.5]
            await until(lambda: "hello from the reward" in caplog.text and "raw" in caplog.text)


@in_loop
async def test_closing_lets_the_function_flush_its_files(functions: Path, tmp_path: Path) -> None:
    async with opened(f"{functions}:writing") as reward:
        await send_command(reward, "a", log=str(tmp_path / "log"))
    assert (tmp_path / "log").read_text() == "scored"


@in_loop
async def test_closing_ends_a_call_in_flight(functions: Path) -> None:
    async with opened(f"{functions}:sleeping", timeout_s=600) as reward:
        call = asyncio.ensure_future(send_command(reward, "a"))
        await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await reward.close()
            with pytest.raises(RewardError):
                await call
    with pytest.raises(RewardError, match="closed"):
        await send_command(reward, "a")


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere a busy worker notices only between two calls"
)
@pytest.mark.parametrize("name", ["looping", "holding_the_gil", "good"])
@in_loop
async def test_workers_end_with_a_parent_that_is_killed(functions: Path, name: str) -> None:
    program = textwrap.dedent(f"""
        import asyncio
        from paceline.reward.reward import RewardSettings, open_reward
        from paceline.types import Prompt, Trajectory
        async def main():
            reward = await open_reward(RewardSettings(function={f"{functions}:{name}"!r}, timeout_s=600), None)
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
            r"one_argument\(answer\) cannot be called as reward\(answer, row\)",
        ),
        (
            "{file}:generator",
            "'generator' is a generator; expected a function that returns a number",
        ),
        (
            "{file}:for_trl",
            r"written for TRL; .* reward\(answer, row\). Wrap it: .*return for_trl\(completions=\[answer\], \*\*row\)\[0\]",
        ),
        (
            "{file}:for_verl",
            r'written for verl; .*return for_verl\(row\["data_source"\], answer, .*ground_truth',
        ),
        (
            "{file}:Judge.__call__",
            r"cannot be called as reward\(answer, row\), where row is the data set row",
        ),
        ("{wrong}:f", r"importing it raised SyntaxError: .* \(.*wrong\.py:2\)"),
        (
            "{broken}:f",
            r"importing it raised NameError: name 'oops' is not defined \(.*broken\.py:2\)",
        ),
        (
            "last_nubmer",
            "neither a verifier nor an entry point of 'paceline.rewards'; did you mean 'last_number'?",
        ),
    ],
)
@in_loop
async def test_a_function_that_cannot_be_loaded_stops_the_run_before_it_starts(
    functions: Path, function: str, message: str
) -> None:
    broken = functions.with_name("broken.py")
    broken.write_text("import os\noops\n")
    wrong = functions.with_name("wrong.py")
    wrong.write_text("import os\ndef f(answer, row:\n")
    with pytest.raises(ConfigError, match=rf"reward\.function = .*{message}"):
        await open_reward(
            RewardSettings(
                function=function.format(file=functions, broken=broken, wrong=wrong), workers=2
            ),
            task=None,
        )


@pytest.mark.skipif(sys.platform != "linux", reason="open files are counted through /proc")
@in_loop
async def test_more_processes_than_can_be_had_are_refused_in_words_and_none_is_left(
    functions: Path,
) -> None:
    before, limits = children(), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, limits[1]))
    try:
        with pytest.raises(
            RewardError,
            match=r"my_rewards\.py:good': a process could not be started beside \d+ others: .*Too many open files",
        ):
            await open_reward(RewardSettings(function=f"{functions}:good", workers=40), task=None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert children() == before


@in_loop
async def test_a_module_on_the_path_works_too(
    functions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(functions.parent))
    async with opened("my_rewards:good") as reward:
        assert await send_command(reward, "aa") == [3.0]


@in_loop
async def test_a_function_of_the_program_itself_is_a_reward_async_or_not() -> None:
    async def judge(answer: str, row: Mapping[str, Any]) -> dict[str, float]:
        await asyncio.sleep(0 if answer else 600)
        return {"reward": len(answer), "bonus": row["bonus"]}

    def broken(answer: str, row: Mapping[str, Any]) -> float:
        return 1 / len(answer)

    reward = await open_reward(RewardSettings(timeout_s=0.2), None, judge)
    assert await send_command(reward, "a", "bb") == [
        {"reward": 1.0, "bonus": 1.0},
        {"reward": 2.0, "bonus": 1.0},
    ]
    with pytest.raises(RewardError, match=r"judge', prompt .*no answer within 0\.2 s"):
        await send_command(reward, "a", "")
    reward = await open_reward(RewardSettings(function="exact"), None, broken)
    assert await send_command(reward, "ab") == [0.5]
    with pytest.raises(RewardError, match=r"broken', prompt .*raised ZeroDivisionError"):
        await send_command(reward, "")


@in_loop
async def test_the_tasks_own_score_is_the_default() -> None:
    reward = await open_reward(RewardSettings(), task="sort:3")
    assert isinstance(reward, BuiltinReward)
    assert await send_command(reward, "123", "999", answer="123") == [1.0, 0.0]
    with pytest.raises(
        RewardError, match=r"reward 'sort:3', prompt 'q7': raised KeyError: 'answer'"
    ):
        await send_command(reward, "123")
    await reward.close()


@in_loop
async def test_verifiers_go_by_their_names() -> None:
    reward = await open_reward(RewardSettings(function="last_number"), task=None)
    assert await send_command(reward, "it is 7", answer="#### 7") == [1.0]
    async with opened("regex") as reward:
        assert await send_command(reward, "A: 7", pattern=r"A: (\d)", answer="7") == [1.0]


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("exact", {}, "the row has no 'answer' to compare with"),
        ("boxed", {"answer": None}, "the row has no 'answer' to compare with"),
        ("tagged", {"answer": ["a", "b"]}, r"row\['answer'\] is list; expected text or a number"),
        ("last_number", {"answer": "none"}, "holds no number"),
    ],
)
@in_loop
async def test_a_row_no_answer_can_be_compared_with_is_refused_by_its_place(
    name: str, row: dict[str, Any], message: str
) -> None:
    reward = await open_reward(RewardSettings(function=name), task=None)
    assert isinstance(reward, BuiltinReward)
    reward.check([("a.jsonl:1", {"answer": "1"})])
    with pytest.raises(
        DataError,
        match=rf"a\.jsonl:2 cannot be judged with reward\.function = '{name}': .*{message}",
    ):
        reward.check([("a.jsonl:1", {"answer": "1"}), ("a.jsonl:2", row)])


@in_loop
async def test_prompts_from_a_file_need_a_reward() -> None:
    with pytest.raises(ConfigError, match=r"need reward\.function"):
        await open_reward(RewardSettings(), task=None)


@in_loop
async def test_many_workers_end_together_not_one_after_the_other(functions: Path) -> None:
    async with opened(f"{functions}:slow_to_leave", workers=12) as reward:
        begun = time.monotonic()
        await reward.close()
        assert time.monotonic() - begun < 6, "each takes half a second to leave"
