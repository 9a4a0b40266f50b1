"""FSDP ranks that generate with the native engine, compared with one device."""

import pytest

from tests.hybrid import HybridRanks, KilledRanks, Run, single_run, table

FSDP = {
    "data parallel": ["train.backend=fsdp"],
    "tensor parallel": ["train.backend=fsdp", "train.tensor_parallel=2"],
}


@pytest.fixture(scope="module")
def single(model: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return single_run(model, tmp_path_factory.mktemp("single"))


class TestFsdp(HybridRanks):
    combination = table(FSDP, slow=["tensor parallel"])


class TestKilledFsdp(KilledRanks):
    combination = table(FSDP, slow=["tensor parallel"])
