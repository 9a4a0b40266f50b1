"""A GPU holds in each phase what `paceline plan` predicts."""

import asyncio
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from paceline.config import load_config
from paceline.run import train
from tests.models import random_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
# Few tokens: activations are a bound, so they must not count.
SHORT = [
    "groups_per_step=1",
    "group_size=4",
    "data.max_prompt_length=60",
    "rollout.max_response_length=4",
    "rollout.slots=128",
]
BACKENDS = {
    "single": [],
    "fsdp": ["train.backend=fsdp", "placement.train_ranks=1"],
    "fsdp, offload": ["train.backend=fsdp", "placement.train_ranks=1", "train.offload=true"],
    "vllm, offload": ["rollout.engine=vllm", "rollout.vllm.eager=true", "train.offload=true"],
}


CASES = {
    **{name: (settings, 40) for name, settings in BACKENDS.items()},
    # What a phase holds besides the model is the same for a larger one.
    "fsdp, offload, larger": (BACKENDS["fsdp, offload"], 90),
    "vllm, offload, larger": (BACKENDS["vllm, offload"], 90),
}


@pytest.mark.parametrize(("settings", "layers"), CASES.values(), ids=CASES)
def test_gpu_holds_planned_memory_in_each_phase(
    settings: list[str], layers: int, tmp_path: Path
) -> None:
    if "rollout.engine=vllm" in settings and not find_spec("vllm"):
        pytest.skip("needs vLLM")
    model = random_model(tmp_path / "model", hidden=1024, layers=layers)  # 1.5 or 3.4 GB in float32
    reward = f"reward.function={Path(__file__).parents[1]}/rewards.py:letters"
    options = [f"model={model}", f"run_dir={tmp_path}/run", "steps=3", "data.task=copy:3", reward]
    config = load_config(None, [*options, *SHORT, *settings])
    summary = asyncio.run(train(config))
    measured, planned = summary["memory_phases"], summary["memory_planned"]
    print({phase: (measured[phase], *sizes) for phase, sizes in planned.items()})  # with -s
    for phase, (least, most) in planned.items():
        expected = least if phase == "train" else most  # without activations, with the KV cache
        assert measured[phase] == pytest.approx(expected, rel=0.1), phase
