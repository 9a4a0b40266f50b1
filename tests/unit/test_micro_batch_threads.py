"""Micro-batches in parallel threads give the results of sequential ones."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from paceline.model import packing
from paceline.model.packing import micro_batches
from paceline.training import single
from paceline.training.micro_batch_threads import MicroBatchThreads
from paceline.training.settings import TrainSettings
from paceline.training.single import SingleDevice
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


def test_two_threads_give_deterministic_gradient_of_one(two_threads: None) -> None:
    found = gradient_of(3)
    for _ in range(3):
        again = gradient_of(3)
        assert all(torch.equal(found[name], again[name]) for name in found)
    torch.set_num_threads(1)
    one = gradient_of(3)
    assert max(float((found[name] - one[name]).abs().max()) for name in found) < 1e-6


def test_logprobs_do_not_depend_on_thread_count(two_threads: None) -> None:
    batch = random_batch(30)
    two = SingleDevice(tiny("qwen2"), TrainSettings()).logprobs(batch)
    torch.set_num_threads(1)
    one = SingleDevice(tiny("qwen2"), TrainSettings()).logprobs(batch)
    assert np.abs(two - one).max() < 1e-6


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("limit", [1, 25, 60, 10_000])
def test_micro_batches_use_all_threads_within_token_limit(
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


def test_threads_run_in_parallel_and_return_results_in_order() -> None:
    meeting = threading.Barrier(2, timeout=60)

    def work(item: int) -> int:
        meeting.wait()  # returns only while another item is in progress
        return item * 10

    assert list(MicroBatchThreads(2).map(work, range(4))) == [0, 10, 20, 30]


def test_threads_keep_working_after_raising_error_to_caller() -> None:
    threads = MicroBatchThreads(2)
    with pytest.raises(ZeroDivisionError):
        list(threads.map(lambda item: 1 // item, [1, 0, 2]))
    assert list(threads.map(lambda item: 1 // item, [1, 1, 1])) == [1, 1, 1]


def test_threads_do_not_change_torch_threads_of_caller(two_threads: None) -> None:
    assert list(MicroBatchThreads(2).map(lambda _: torch.get_num_threads(), range(2))) == [1, 1]
    assert torch.get_num_threads() == 2


def test_engine_uses_one_thread_when_model_is_large(
    two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(p.numel() for p in tiny("qwen2").parameters())
    for limit, threads in ((2 * size, 2), (2 * size - 1, 1)):
        monkeypatch.setattr(single, "THREAD_PARAMETERS", limit)
        assert SingleDevice(tiny("qwen2"), TrainSettings())._threads.count == threads
