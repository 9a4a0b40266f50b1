"""Device-time ledger: pure functions of counters."""

import pytest

from paceline.model.shape import ModelShape
from paceline.observe.device_time import PARTS, DeviceUse, account, describe, saturated_rate
from paceline.observe.flops import peak_flops, train_flops

ENGINE = DeviceUse(
    "rollout",
    generates=True,
    trains=False,
    elapsed=10.0,
    seconds={"decode/8": 4.0, "decode/2": 2.0, "prefill": 1.0},
    tokens={"decode/8": 4000.0, "decode/2": 500.0},
)
TRAINER = DeviceUse(
    "train", generates=False, trains=True, elapsed=10.0, seconds={"training": 6.0, "sync": 1.0}
)
CONTROLLER = {("groups", "generated"): 2.0, ("train", "generated"): 6.0, ("sync", "nothing"): 2.0}


def test_decode_below_saturated_rate_is_underfilled() -> None:
    assert saturated_rate([ENGINE]) == 1000.0
    found = account([ENGINE], CONTROLLER, 1000.0)
    assert found.parts["generation"] == pytest.approx(4.5)
    assert found.parts["underfilled"] == pytest.approx(1.5)
    assert sum(found.parts.values()) == pytest.approx(10.0)


def test_fill_level_with_little_time_is_not_saturated_one() -> None:
    seconds = {"decode/8": 10.0, "decode/7": 0.001}
    tokens = {"decode/8": 10.0, "decode/7": 100.0}
    assert saturated_rate([DeviceUse("p", True, False, 20.0, seconds, tokens)]) == 1.0


def test_wasted_and_evaluated_tokens_are_not_generation() -> None:
    found = account([ENGINE], CONTROLLER, 1000.0, wasted_tokens=1000, evaluation_tokens=500)
    assert found.parts["wasted"] == pytest.approx(1.0)
    assert found.parts["evaluation"] == pytest.approx(0.5)
    assert found.parts["generation"] == pytest.approx(3.0)
    assert sum(found.parts.values()) == pytest.approx(10.0)


def test_idle_device_waits_for_what_controller_did() -> None:
    found = account([TRAINER], CONTROLLER, 0.0)
    assert found.parts["wait_groups"] == pytest.approx(2.0)
    assert found.parts["wait_sync"] == pytest.approx(1.0)


def test_speed_of_light_is_that_of_busiest_pool() -> None:
    assert account([ENGINE, TRAINER], CONTROLLER, 1000.0).speed_of_light == pytest.approx(0.6)
    slower = account([ENGINE, TRAINER], CONTROLLER, 500.0)
    assert slower.speed_of_light == pytest.approx(0.7)  # all decode time is needed, and prefill


def test_workers_on_one_device_never_exceed_its_time() -> None:
    both = DeviceUse("p", True, True, 5.0, {"training": 6.0, "decode/8": 4.0}, {"decode/8": 8.0})
    found = account([both], {}, 2.0)
    assert found.parts["training"] == pytest.approx(3.0)
    assert sum(found.parts.values()) == pytest.approx(5.0)


def test_description_names_largest_parts() -> None:
    seconds = dict.fromkeys(PARTS, 0.0) | {"training": 6.0, "wait_groups": 4.0}
    assert describe(seconds, 10.0) == "training 60%, waiting for groups 40%"
    assert describe(seconds, 0.0) == ""


def test_flops_are_six_per_weight_and_token_plus_attention() -> None:
    shape = ModelShape(2, 8, 16, 2, 1, 4, 100)
    weights = 2 * (8 * (16 + 8) + 3 * 8 * 16) + 800
    assert train_flops(shape, [10, 10]) == 6 * weights * 20 + 12 * 2 * 8 * 100


def test_peak_is_known_for_16_bit_on_listed_gpus() -> None:
    assert peak_flops("NVIDIA H200", "bfloat16") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "bfloat16") == 312e12
    assert peak_flops("NVIDIA RTX A1000 Laptop GPU", "bfloat16") is None
    assert peak_flops("NVIDIA H200", "float32") is None
    assert peak_flops("", "bfloat16") is None
