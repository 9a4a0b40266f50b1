"""Megatron ranks that generate with the native engine, compared with one device."""

import pytest

from tests.hybrid import HybridRanks, KilledRanks, Run, single_run, table

MEGATRON = {
    "data parallel": ["train.backend=megatron"],
    "tensor parallel": ["train.backend=megatron", "train.tensor_parallel=2"],
    "pipeline parallel": ["train.backend=megatron", "train.pipeline_parallel=2"],
}


@pytest.fixture(scope="module")
def single(model: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return single_run(model, tmp_path_factory.mktemp("single"))


class TestMegatron(HybridRanks):
    combination = table(MEGATRON)


class TestKilledMegatron(KilledRanks):
    combination = table(MEGATRON)
