"""Clock of a device: every second is counted once."""

import threading

import pytest

from paceline.remote.device_clock import (
    REPORT_INTERVAL_S,
    DeviceClock,
    decoding,
    doing,
    use_clock,
)


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_nested_activity_interrupts_outer_one() -> None:
    time = Time()
    clock = DeviceClock(now=time)

    def work() -> None:
        use_clock(clock)
        with doing("training"):
            time.now += 2
            with doing("switching"):
                time.now += 3
            time.now += 4
        time.now += 5

    thread = threading.Thread(target=work)  # the clock of this thread stays unset
    thread.start()
    thread.join()
    report = clock.report()
    assert report.seconds == {"training": 6.0, "switching": 3.0}
    assert report.now - report.started == 14.0


def test_concurrent_activities_share_time() -> None:
    time = Time()
    clock = DeviceClock(now=time)
    training = clock.enter("training")
    time.now += 1
    decode = clock.enter("decode/8")
    time.now += 4
    assert clock.report().seconds == {"training": 3.0, "decode/8": 2.0}  # both still run
    clock.leave(training)
    time.now += 1
    clock.leave(decode)
    time.now += 7
    report = clock.report()
    assert report.seconds == {"training": 3.0, "decode/8": 3.0}
    assert report.now - report.started == 13.0


def test_seconds_measured_later_move_to_another_activity() -> None:
    time = Time()
    clock = DeviceClock(now=time)
    decode = clock.enter("decode/8")
    time.now += 2
    clock.leave(decode)
    clock.move(0.5, "decode/8", "prefill")
    clock.move(9.0, "decode/8", "prefill")  # more than there is
    assert clock.report().seconds == {"decode/8": 0.0, "prefill": 2.0}


def test_equal_consecutive_activities_become_one_event() -> None:
    time = Time()
    clock = DeviceClock(keep_events=True, now=time)
    for _ in range(10):
        clock.leave(clock.enter("decode/8"))
        time.now += 1e-4
    time.now += 1
    clock.leave(clock.enter("decode/8"))
    events = clock.report().events
    assert [event[0] for event in events] == ["decode/8", "decode/8"]
    assert events[0][2] == pytest.approx(9e-4)
    assert clock.report().events == ()


def test_clock_reports_again_when_interval_has_passed() -> None:
    time = Time()
    clock = DeviceClock(now=time)
    assert clock.due_report() is not None  # the first one starts the ledger of the worker
    time.now += REPORT_INTERVAL_S / 2
    assert clock.due_report() is None
    time.now += REPORT_INTERVAL_S
    report = clock.due_report()
    assert report is not None and report.now == time.now


def test_activity_counts_its_tokens() -> None:
    clock = DeviceClock()

    def work() -> None:
        use_clock(clock)
        for made in (3, 0, 4):
            with doing("decode/8") as decoded:
                decoded.count = made

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert clock.report().counts == {"decode/8": 7}


@pytest.mark.parametrize(
    ("running", "slots", "level"), [(1, 64, 1), (8, 64, 1), (9, 64, 2), (64, 64, 8), (3, 3, 8)]
)
def test_fill_level_counts_eighths_of_slots(running: int, slots: int, level: int) -> None:
    assert decoding(running, slots) == f"decode/{level}"
