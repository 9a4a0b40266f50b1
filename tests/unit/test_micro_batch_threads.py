"""Micro-batches side by side give what one after the other gives."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from paceline.model import packing
from paceline.model.packing import micro_batches
from paceline.train import single
from paceline.train.micro_batch_threads import MicroBatchThreads
from paceline.train.settings import TrainSettings
from paceline.train.single import SingleDevice
from tests.contract.test_train_engine import LOSS, gradients, random_batch, tiny


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(packing, "THREAD_TOKENS", 8)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def gradient_of(batch_seed: int) -> dict[str, torch.Tensor]:
    model = tiny("qwen2-tied")
    SingleDevice(model, TrainSettings(micro_batch_tokens=60)).forward_backward(
        random_batch(30, batch_seed), LOSS
    )
    return gradients(model)


def test_two_lanes_give_the_gradient_of_one_and_always_the_same_bits(two_threads: None) -> None:
    found = gradient_of(3)
    for _ in range(5):
        again = gradient_of(3)
        assert all(torch.equal(found[name], again[name]) for name in found)
    torch.set_num_threads(1)
    one = gradient_of(3)
    assert max(float((found[name] - one[name]).abs().max()) for name in found) < 1e-6


def test_log_probs_do_not_depend_on_the_lanes(two_threads: None) -> None:
    batch = random_batch(30)
    two = SingleDevice(tiny("qwen2"), TrainSettings()).logprobs(batch)
    torch.set_num_threads(1)
    one = SingleDevice(tiny("qwen2"), TrainSettings()).logprobs(batch)
    assert np.abs(two - one).max() < 1e-6


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("limit", [1, 25, 60, 10_000])
def test_micro_batches_are_even_within_the_limit_and_enough_for_all_lanes(
    threads: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "THREAD_TOKENS", 8)
    batch = random_batch(40)
    found = list(micro_batches(batch, limit, torch.device("cpu"), threads))
    sizes = [micro.layout.rows * micro.layout.longest for micro in found]
    assert all(
        size <= limit or micro.layout.rows == 1 for size, micro in zip(sizes, found, strict=True)
    )
    assert (
        sorted(np.concatenate([micro.flat for micro in found]))
        == np.flatnonzero(batch.mask).tolist()
    )
    if limit == 10_000:
        assert len(found) == threads and max(sizes) - min(sizes) <= 0.25 * max(sizes)


def test_results_come_in_order_and_lanes_really_run_side_by_side() -> None:
    meeting = threading.Barrier(2, timeout=10)

    def work(item: int) -> int:
        meeting.wait()  # passes only when another item is being worked on
        return item * 10

    assert list(MicroBatchThreads(2).map(work, range(4))) == [0, 10, 20, 30]


def test_an_error_in_a_lane_reaches_the_caller_and_lanes_still_work() -> None:
    threads = MicroBatchThreads(2)
    with pytest.raises(ZeroDivisionError):
        list(threads.map(lambda item: 1 // item, [1, 0, 2]))
    assert list(threads.map(lambda item: 1 // item, [1, 1, 1])) == [1, 1, 1]


def test_a_lane_does_not_change_how_many_threads_its_caller_has(two_threads: None) -> None:
    assert list(MicroBatchThreads(2).map(lambda _: torch.get_num_threads(), range(2))) == [1, 1]
    assert torch.get_num_threads() == 2


def test_a_model_too_large_for_a_gradient_per_lane_gets_one_lane(
    two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(p.numel() for p in tiny("qwen2").parameters())
    for limit, threads in ((2 * size, 2), (2 * size - 1, 1)):
        monkeypatch.setattr(single, "THREAD_PARAMETERS", limit)
        assert SingleDevice(tiny("qwen2"), TrainSettings())._threads.count == threads
