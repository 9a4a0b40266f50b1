"""Training and generation at the same time on one GPU do not change each other's results."""

import threading

import pytest
import torch
from transformers import PreTrainedModel

from paceline.rollout.native.engine import NativeEngine
from paceline.training.settings import TrainSettings
from paceline.training.single import SingleDevice
from tests.gpu.test_fused_gpu import LOSS, batch_of, gradient, relative_error
from tests.gpu.test_native_gpu import LENGTH, build, mixed, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def make() -> tuple[PreTrainedModel, SingleDevice, NativeEngine]:
    model = build("qwen2, 7 heads to a kv head, tied").cuda()
    trained = SingleDevice(model, TrainSettings(dtype="bfloat16", micro_batch_tokens=2000))
    trained.limit_launches()
    weights = trained.copied_weights(LENGTH)
    return model, trained, NativeEngine(model.config, weights, slots=64, max_length=LENGTH)


def test_gradients_beside_a_busy_engine_equal_those_alone() -> None:
    model, trained, engine = make()
    batch = batch_of(64, 150)

    def computed() -> dict[str, torch.Tensor]:
        trained.forward_backward(batch, LOSS)
        torch.cuda.current_stream().synchronize()
        found = gradient(model)
        trained.optimizer_step(0.0)
        return found

    computed()  # compiles
    alone, again = computed(), computed()
    noise = max(relative_error(again[name], alone[name]) for name in alone)
    stop, decoded = threading.Event(), [0]

    def decode() -> None:
        while not stop.is_set():
            run(engine, mixed())
            decoded[0] += 1

    thread = threading.Thread(target=decode)
    thread.start()
    try:
        beside = []
        while len(beside) < 20 or not decoded[0]:
            beside.append(computed())
    finally:
        stop.set()
        thread.join()
    for found in beside:
        error = max(relative_error(found[name], alone[name]) for name in alone)
        assert error <= max(2 * noise, 1e-3)


def test_completions_beside_training_equal_those_alone() -> None:
    _, trained, engine = make()
    batch = batch_of(64, 150)
    alone = run(engine, mixed())
    stop = threading.Event()

    def train() -> None:
        while not stop.is_set():
            trained.forward_backward(batch, LOSS)
            trained.optimizer_step(1e-3)  # the engine has separate weights

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(5):
            beside = run(engine, mixed())
            assert {k: c.tokens.tolist() for k, c in beside.items()} == {
                k: c.tokens.tolist() for k, c in alone.items()
            }
    finally:
        stop.set()
        thread.join()
