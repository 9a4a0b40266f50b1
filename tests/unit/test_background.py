"""Coroutines on a thread: results, errors, cancellation and the end of the program."""

import _thread
import asyncio
import concurrent.futures
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from paceline import background
from paceline.background import Background
from paceline.job import Stopping
from tests.fault_report import Fault

ROOT = Path(__file__).parents[2]


async def _forever(started: threading.Event, cleaned: threading.Event) -> None:
    try:
        started.set()
        await asyncio.Event().wait()
    finally:
        await asyncio.to_thread(cleaned.set)


def test_result_is_returned_in_running_event_loop() -> None:
    async def double(number: int) -> int:
        return 2 * number

    async def notebook() -> int:
        return Background(double(21)).result()  # blocks, as a cell of a notebook does

    assert asyncio.run(notebook()) == 42


def test_error_is_raised_with_its_type() -> None:
    async def fail() -> None:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        Background(fail()).result()


def test_cancel_waits_for_clean_up() -> None:
    started, cleaned = threading.Event(), threading.Event()
    running = Background(_forever(started, cleaned))
    assert started.wait(60)
    running.cancel()
    assert cleaned.is_set()
    with pytest.raises(asyncio.CancelledError):
        running.result()


def test_terminal_is_closed_when_wait_for_ending_run_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(key: str) -> None:
        raise KeyboardInterrupt

    async def never() -> dict[str, Any]:
        raise AssertionError("the run has started")

    monkeypatch.setattr(Background, "wait_for_ending", interrupt)
    closed, closing = threading.Event(), ExitStack()
    closing.callback(closed.set)
    with pytest.raises(KeyboardInterrupt):
        Stopping(asyncio.Event(), 1.0).in_background("runs/a", never, closing, None)
    assert closed.is_set()


def test_cancelled_caller_cancels_coroutine() -> None:
    started, cleaned = threading.Event(), threading.Event()

    async def caller() -> None:
        await Background(_forever(started, cleaned)).wait()

    async def main() -> None:
        task = asyncio.create_task(caller())
        await asyncio.to_thread(started.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert cleaned.is_set()


def test_end_returns_result_of_coroutine() -> None:
    event = asyncio.Event()

    async def until() -> str:
        await event.wait()
        return "ended"

    running = Background(until())
    running.end(event.set)
    assert running.result() == "ended"
    running.end(event.set)  # has no effect after the end


@pytest.mark.parametrize(("ask", "expected"), [("", "cleaned"), ("running.end(event.set)", "done")])
def test_program_end_cancels_or_waits(ask: str, expected: str) -> None:
    program = f"""
import asyncio, threading
from paceline.background import Background
event, started = asyncio.Event(), threading.Event()
async def work():
    try:
        started.set()
        await event.wait()
        await asyncio.to_thread(print, "done")
    except asyncio.CancelledError:
        await asyncio.to_thread(print, "cleaned")
        raise
running = Background(work())
started.wait()
{ask}
"""
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert found.stdout.strip() == expected


BLOCKED = """
    import asyncio, time
    from paceline.background import Background
    from tests.unit.test_background import until_main_thread_waits

    async def work():
        until_main_thread_waits()
        print("blocked", flush=True)
        time.sleep(1000)

    Background(work()).result()
"""


def test_interrupt_ends_program_whose_event_loop_is_blocked() -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(BLOCKED)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with program:
        try:
            assert program.stdout is not None and program.stdout.readline() == "blocked\n"
            program.send_signal(signal.SIGINT)
            _, errors = program.communicate(timeout=120)
        finally:
            program.kill()
    assert "KeyboardInterrupt" in errors
    assert "its event loop is blocked at <string>:9 in work" in errors


HANGING_CLEAN_UP = """
    import asyncio, contextlib
    from paceline.background import Background
    from tests.unit.test_background import until_main_thread_waits

    async def work():
        until_main_thread_waits()
        try:
            print("running", flush=True)
            await asyncio.Event().wait()
        finally:
            print("cleaning up", flush=True)
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()

    Background(work()).result()
"""


def test_second_interrupt_ends_program_whose_clean_up_hangs() -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HANGING_CLEAN_UP)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with program:
        try:
            for line in ("running\n", "cleaning up\n"):
                assert program.stdout is not None and program.stdout.readline() == line
                program.send_signal(signal.SIGINT)
            _, errors = program.communicate(timeout=120)
        finally:
            program.kill()
    assert "KeyboardInterrupt" in errors


def test_clean_up_that_blocks_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "CLEAN_UP_BLOCKED_S", 0.5)
    started, end = threading.Event(), threading.Event()

    async def work() -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            end.wait()

    running = Background(work())
    assert started.wait(60)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        running.result()
    end.set()


HANGING_CALL = """
    import asyncio, time
    from paceline.background import Background

    async def work():
        async with asyncio.timeout(0.5):
            await asyncio.to_thread(time.sleep, 1000)

    Background(work()).result()
"""


def test_program_ends_though_call_on_thread_never_returns() -> None:
    program = [sys.executable, "-c", textwrap.dedent(HANGING_CALL)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert "TimeoutError" in ended.stderr


def test_calls_on_threads_return_values_and_errors() -> None:
    def number(n: int) -> int:
        if n == 13:
            raise ValueError("13")
        return n

    async def work() -> list[object]:
        calls = [asyncio.to_thread(number, n) for n in range(300)]  # more than there are threads
        return await asyncio.gather(*calls, return_exceptions=True)

    found = Background(work()).result()
    assert str(found.pop(13)) == "13" and found == [n for n in range(300) if n != 13]


def test_abandoned_coroutine_cleans_up_when_it_continues() -> None:
    blocked, go_on, cleaned = threading.Event(), threading.Event(), threading.Event()

    async def work() -> None:
        blocked.set()
        go_on.wait()
        assert Background.current() is running
        try:
            await asyncio.sleep(1000)
        finally:
            cleaned.set()

    running = Background(work())
    assert blocked.wait(60)
    running.abandon(KeyError("lost"))
    with pytest.raises(KeyError, match="lost"):
        running.result()
    assert not cleaned.is_set()
    go_on.set()
    assert cleaned.wait(60)


def until_main_thread_waits() -> None:
    main, wait = threading.main_thread().ident, concurrent.futures.wait.__code__
    assert main is not None
    while not any(
        frame.f_code is wait for frame, _ in traceback.walk_stack(sys._current_frames()[main])
    ):
        time.sleep(0.001)


def _interrupted_after(started: threading.Event) -> None:
    """Press Ctrl-C once the coroutine has started and the main thread waits for it."""

    def press() -> None:
        started.wait(60)
        until_main_thread_waits()
        _thread.interrupt_main()

    threading.Thread(target=press, daemon=True).start()


def test_ctrl_c_lets_coroutine_finish() -> None:
    started, event, finished = threading.Event(), asyncio.Event(), threading.Event()

    async def work() -> None:
        started.set()
        await event.wait()
        finished.set()

    def stop() -> bool:
        event.set()
        return True

    _interrupted_after(started)
    with pytest.raises(KeyboardInterrupt):
        Background(work(), stop, grace_s=60).result()
    assert finished.is_set()


def test_ctrl_c_raises_error_of_coroutine_that_fails_before_its_end() -> None:
    started, event = threading.Event(), asyncio.Event()

    async def work() -> None:
        started.set()
        await event.wait()
        raise OSError("disk full")

    def stop() -> bool:
        event.set()
        return True

    _interrupted_after(started)
    with pytest.raises(OSError, match="disk full"):
        Background(work(), stop, grace_s=60).result()


@pytest.mark.parametrize(("stops", "grace_s"), [(True, 0.3), (False, 250.0)])
def test_ctrl_c_cancels_coroutine_that_does_not_finish(stops: bool, grace_s: float) -> None:
    started, cleaned = threading.Event(), threading.Event()
    _interrupted_after(started)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        Background(_forever(started, cleaned), lambda: stops, grace_s).result()
    assert cleaned.is_set() and time.monotonic() - begun < 120


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.fault("A13", "second signal {second.name} while a command stops")
def test_second_signal_ends_command_at_once(second: signal.Signals, fault: Fault) -> None:
    program = """
import asyncio, time
from paceline.background import Background
from paceline.cli.train import stopped_by_signals
from tests.unit.test_background import until_main_thread_waits
async def work():
    await asyncio.to_thread(until_main_thread_waits)
    print("started", flush=True)
    while True:
        try:
            await asyncio.to_thread(time.sleep, 100)
        except asyncio.CancelledError:
            pass
def stop():
    print("stopping", flush=True)
    return True
with stopped_by_signals():
    Background(work(), stop, grace_s=1000).result()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == b"stopping\n"
        process.send_signal(second)
        fault.fired()
        assert process.wait(60) == 128 + second
        fault.detected()
