"""A rank that is killed ends its group, which is therefore not shared with other tests."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from paceline.errors import WorkerDied
from tests.contract.test_train_engine import random_batch
from tests.megatron.factory import make
from tests.megatron.test_megatron import GRPO, LAYOUTS, in_ranks
from tests.ranks import Ranks


def test_group_ends_when_rank_is_killed(tmp_path: Path) -> None:
    ranks = Ranks(make, 2, tmp_path)
    engine = in_ranks(ranks, "qwen2", LAYOUTS["pp2"])
    pids = [rank.process.pid for rank in ranks.group.ranks]
    os.kill(pids[1], signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(WorkerDied, match="rank 1"):
        engine.forward_backward(random_batch(), GRPO)
    assert time.monotonic() - started < 30
    ranks.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
