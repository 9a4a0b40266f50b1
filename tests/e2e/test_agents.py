"""Runs in which a program with an OpenAI client is the environment."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.config import load_config
from paceline.errors import ConfigError, RewardError
from paceline.run import train
from tests.audits import assert_consistent
from tests.endpoints import said, served
from tests.small_runs import SEPARATE, SMALL, config, steps_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "agent_openai.py"
REWARDS = Path(__file__).parents[1] / "rewards.py"


@pytest.mark.parametrize(
    "place",
    [[], pytest.param([*SEPARATE, "schedule.max_staleness=1"], marks=pytest.mark.slow)],
)
def test_run_trains_on_episodes_of_openai_client(
    place: list[str], model: str, tmp_path: Path
) -> None:
    chosen = [f"model={model}", f"run_dir={tmp_path}", *SMALL, *place, "steps=2", "save_samples=4"]
    chosen += [f"rollout.agent={EXAMPLE}:play", "data.max_prompt_length=64"]
    chosen += [f"reward.function={REWARDS}:raises"]  # not called: the program returns rewards
    asyncio.run(train(load_config(None, chosen)))
    assert_consistent(tmp_path)
    for row in steps_of(tmp_path):
        assert row["episode/end_done"] == 1 and row["episode/turns_mean"] > 1


@pytest.mark.slow
def test_model_learns_from_rewards_of_agent_program(tmp_path: Path) -> None:
    chosen = [f"run_dir={tmp_path}", f"rollout.agent={EXAMPLE}:play", "steps=30"]
    asyncio.run(train(load_config("hybrid", chosen)))
    rewards = [row["reward/mean"] for row in steps_of(tmp_path)]
    assert sum(rewards[:3]) / 3 < 0.5 and sum(rewards[-5:]) / 5 > 0.7


def ask_once(client: Any, row: dict[str, Any]) -> float | None:
    message = {"role": "user", "content": row["prompt"]}
    reply = client.chat.completions.create(model="policy", messages=[message], max_tokens=1)
    assert reply.usage.completion_tokens == 1, "the engine did not get the limit of the request"
    return row.get("reward")


def options(model: str, folder: Path) -> dict[str, Any]:
    small = {"groups_per_step": 2, "group_size": 2, "steps": 1, "placement.threads": 1}
    short = {"rollout.max_response_length": 4, "rollout.agent": ask_once}
    return {"model": model, "run_dir": str(folder), "display": False, **small, **short}


def test_function_of_program_is_scored_by_reward_when_it_returns_none(
    model: str, tmp_path: Path
) -> None:
    given = options(model, tmp_path / "run")
    rows = [{"prompt": "a"}, {"prompt": "b", "reward": 3.0}]
    run = paceline.train(data=rows, reward=lambda completion, row: 5.0, **given)
    assert run.summary["reward_last"] == pytest.approx(4.0)
    with pytest.raises(RewardError, match=r"rollout\.agent returned None"):
        paceline.train(data=rows, **given | {"run_dir": str(tmp_path / "other")})
    del given["display"], given["steps"]
    result = paceline.evaluate(data=rows, reward=lambda completion, row: 5.0, **given)
    assert result["reward"] == pytest.approx(4.0)


def test_run_trains_on_scores_of_judge(model: str, tmp_path: Path) -> None:
    async def reply(request: Any) -> Any:
        asked = (await request.json())["messages"][0]["content"]
        return said(f"Score: {len(asked) % 11}")

    async def run() -> None:
        async with served(reply) as url:
            chosen = [*SMALL[:-1], f"model={model}", f"run_dir={tmp_path}", "steps=2"]
            chosen += ["reward.function=judge", f"reward.judge.base_url={url}"]
            await train(load_config(None, [*chosen, "reward.judge.model=judge"]))

    asyncio.run(run())
    assert_consistent(tmp_path)
    assert all(0 <= row["reward/mean"] <= 1 for row in steps_of(tmp_path))
    assert (tmp_path / "judge.jsonl").read_text().count("number") > 1


def test_agent_contradicts_other_environments(model: str, tmp_path: Path) -> None:
    chosen = [f"model={model}", f"run_dir={tmp_path}", *SMALL, f"rollout.agent={EXAMPLE}:play"]
    with pytest.raises(ConfigError, match=r"rollout\.agent .*contradicts rollout\.tools"):
        load_config(None, [*chosen, 'rollout.tools=["calculator"]'])


def wrong(robot: Any) -> None: ...


def test_program_with_unknown_parameter_is_rejected(model: str, tmp_path: Path) -> None:
    chosen = config(model, tmp_path, f"rollout.agent={__file__}:wrong")
    with pytest.raises(ConfigError, match="parameter 'robot'"):
        asyncio.run(train(chosen))
