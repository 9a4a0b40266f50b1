"""Agent programs with vLLM: the endpoint reaches every engine through the same `generate`."""

import asyncio
from pathlib import Path

from paceline.config import load_config
from paceline.run import train
from tests.audits import assert_consistent
from tests.models import random_model
from tests.small_runs import steps_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "agent_openai.py"


def test_agent_program_trains_with_vllm(tmp_path: Path) -> None:
    model = random_model(tmp_path / "model", hidden=128)  # vLLM on CPUs needs heads of at least 32
    run_dir = tmp_path / "run"
    chosen = [f"model={model}", f"run_dir={run_dir}", "rollout.engine=vllm", "data.task=copy:3"]
    chosen += ["groups_per_step=2", "group_size=2", "steps=2", "placement.threads=1"]
    chosen += ["rollout.max_response_length=16", "data.max_prompt_length=64"]
    asyncio.run(train(load_config(None, [*chosen, f"rollout.agent={EXAMPLE}:play"])))
    assert_consistent(run_dir)
    assert max(row["episode/turns_mean"] for row in steps_of(run_dir)) > 1
