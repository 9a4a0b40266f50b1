"""FSDP and Megatron ranks that generate with vLLM, compared with one device and the native engine.

vLLM is an engine per rank, or one engine on both ranks.
"""

import pytest

from tests.hybrid import HybridRanks, KilledRanks, Run, single_run, table
from tests.models import random_model

FSDP, MEGATRON = "train.backend=fsdp", "train.backend=megatron"
TRAINERS = {
    "fsdp": [FSDP],
    "fsdp, tensor parallel": [FSDP, "train.tensor_parallel=2"],
    "megatron, data parallel": [MEGATRON],
    "megatron, tensor parallel": [MEGATRON, "train.tensor_parallel=2"],
    "megatron, pipeline parallel": [MEGATRON, "train.pipeline_parallel=2"],
}
PER_RANK = {name: [*settings, "rollout.engine=vllm"] for name, settings in TRAINERS.items()}
ON_BOTH = {
    f"{name}, one engine": [*settings, "rollout.tensor_parallel=2"]
    for name, settings in PER_RANK.items()
}
STAGES = {"fsdp, one engine of two stages": [*PER_RANK["fsdp"], "rollout.pipeline_parallel=2"]}
VLLM = PER_RANK | ON_BOTH | STAGES
QUICK = {*PER_RANK, "fsdp, one engine", "megatron, tensor parallel, one engine"}
QUICK_KILLED = {"fsdp", "megatron, tensor parallel, one engine"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    # vLLM on CPUs needs heads of at least 32.
    return random_model(tmp_path_factory.mktemp("model"), hidden=128)


@pytest.fixture(scope="module")
def single(model: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return single_run(model, tmp_path_factory.mktemp("single"))


class TestVllm(HybridRanks):
    combination = table(VLLM, slow=VLLM.keys() - QUICK)


class TestKilledVllm(KilledRanks):
    combination = table(VLLM, slow=VLLM.keys() - QUICK_KILLED)
