"""LoRA, the reference model and the reward model in complete runs, in shared and separate pools."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from paceline.config import RunConfig, load_config
from paceline.errors import CheckpointError, ConfigError, ModelError
from paceline.model.loading import load_model
from paceline.remote.worker import Worker
from paceline.rollout.client import EngineClient
from paceline.run import train
from paceline.sync.connect import connect
from paceline.sync.transport import InPlace
from paceline.sync.weights import WeightTransport
from paceline.types import Batch, Completion, Request, Role, Sampling
from paceline.workers.build import build_parts
from paceline.workers.local import LocalCluster
from paceline.workers.pools import close_workers, plan_workers, start_workers
from tests.models import random_reward_model
from tests.small_runs import SEPARATE, SMALL, config, run, steps_of, weights

LORA = ["train.lora.rank=4", "train.learning_rate=1e-2"]
PROMPT = (5, 9, 13, 2, 7)
MODES = {"hybrid": [], "separate": SEPARATE}


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return random_reward_model(tmp_path_factory.mktemp("reward"))


def batch() -> Batch:
    rng = np.random.default_rng(0)
    lengths = np.array([12, 9, 15], np.int32)
    total = int(lengths.sum())
    mask = np.ones(total, np.bool_)
    mask[np.cumsum(lengths) - lengths] = False
    tokens = rng.integers(0, 40, total).astype(np.int32)
    row = rng.standard_normal(3).astype(np.float32)
    advantages = np.where(mask, np.repeat(row, lengths), 0).astype(np.float32)
    return Batch(
        tokens,
        lengths,
        mask,
        -3 * mask.astype(np.float32),
        np.where(mask, 0, -1).astype(np.int32),
        row,
        lengths,
        advantages,
    )


@asynccontextmanager
async def started(chosen: RunConfig, folder: Path) -> AsyncIterator[dict[Role, list[Worker]]]:
    cluster = LocalCluster(chosen, chosen.model, folder)
    workers = await start_workers(cluster, plan_workers(chosen, cluster.nodes()), 300)
    try:
        yield workers
    finally:
        await close_workers(workers)


@torch.no_grad()
def matches_greedy(completion: Completion, model: PreTrainedModel) -> bool:
    """Return whether each token is the model's most likely one, with the model's log-prob."""
    ids = torch.tensor([[*PROMPT, *completion.tokens.tolist()]])
    logprobs = torch.log_softmax(model(ids).logits[0, len(PROMPT) - 1 : -1].float(), -1)
    best, token = logprobs.max(-1)
    return token.tolist() == completion.tokens.tolist() and bool(
        np.abs(best.numpy() - completion.logprobs).max() < 1e-4
    )


@pytest.mark.parametrize("mode", MODES)
def test_engine_serves_merged_lora_weights_only_after_weight_sync(
    mode: str, model: str, tmp_path: Path
) -> None:
    chosen = config(model, tmp_path, *LORA, *MODES[mode])

    async def scenario() -> None:
        async with started(chosen, tmp_path) as workers:
            actor = workers[Role.ACTOR][0]
            engine = EngineClient(workers[Role.ROLLOUT][0])
            transport: WeightTransport = InPlace()
            if not chosen.in_place:
                transport = await connect("auto", True, actor, workers[Role.ROLLOUT], "float32")

            async def generate(name: str) -> Completion:
                return await engine.generate(
                    Request(name, PROMPT, 0, Sampling(16, temperature=0.0))
                )

            base = AutoModelForCausalLM.from_pretrained(model).eval()
            await engine.load_weights(await transport.publish(0))
            assert matches_greedy(await generate("start"), base)
            for step in range(5):
                await actor.call(Role.ACTOR, "update", batch(), step)
            await actor.call(Role.ACTOR, "save", str(tmp_path))
            merged = AutoModelForCausalLM.from_pretrained(tmp_path / "actor").eval()
            stale = await generate("not synced")
            assert matches_greedy(stale, base) and not matches_greedy(stale, merged)
            await engine.load_weights(await transport.publish(1))
            fresh = await generate("synced")
            assert matches_greedy(fresh, merged) and not matches_greedy(fresh, base)
            assert fresh.versions.tolist() == [1] * 16

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["train.gradient_checkpointing=true", 'train.lora.targets=["q_proj", "v_proj"]'],
        pytest.param(
            [*SEPARATE, "schedule.max_staleness=2", "schedule.on_sync=swap"],
            marks=pytest.mark.slow,
        ),
        ["schedule.max_staleness=2", "schedule.on_sync=swap"],
    ],
)
def test_lora_trains_adapted_layers_in_every_mode(
    settings: list[str], model: str, tmp_path: Path
) -> None:
    assert run(model, tmp_path, *LORA, *settings)["steps"] == 4
    rows = steps_of(tmp_path)
    assert max(row["train/logprob_diff_max"] for row in rows if row["staleness/max"] == 0) < 1e-4
    trained = AutoModelForCausalLM.from_pretrained(
        tmp_path / "checkpoints" / "step_00000004" / "actor"
    ).state_dict()
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    changed = {
        name.split(".")[-2] for name in before if not torch.equal(before[name], trained[name])
    }
    every = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert changed == (
        {"q_proj", "v_proj"} if any("targets" in setting for setting in settings) else every
    )


@pytest.mark.slow
def test_lora_with_reference_is_bit_identical_across_pools_and_resume(
    model: str, tmp_path: Path
) -> None:
    settings = ["steps=6", *LORA, "algorithm.kl_coef=0.1"]
    run(model, tmp_path / "whole", *settings)
    run(model, tmp_path / "separate", *settings, *SEPARATE, "placement.ref=ref_pool")
    run(model, tmp_path / "parts", *settings, "steps=3")
    run(model, tmp_path / "parts", *settings)
    assert (
        weights(tmp_path / "whole", 6)
        == weights(tmp_path / "separate", 6)
        == weights(tmp_path / "parts", 6)
    )
    assert (tmp_path / "whole" / "ledger.jsonl").read_text() == (
        tmp_path / "parts" / "ledger.jsonl"
    ).read_text()
    run(model, tmp_path / "free", "steps=6", *LORA)
    assert weights(tmp_path / "whole", 6) != weights(tmp_path / "free", 6), (
        "the reference has no effect"
    )


def test_resume_fails_when_lora_rank_changes(model: str, tmp_path: Path) -> None:
    run(model, tmp_path, "steps=1", *LORA)
    with pytest.raises(CheckpointError, match=r"train\.lora\.rank: was 4, is now 8"):
        run(model, tmp_path, "steps=2", *LORA, "train.lora.rank=8")


def test_lora_setting_gets_suggestion_when_misspelled() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown setting 'train\.lora\.rnk'; did you mean 'train\.lora\.rank'\?"
    ):
        load_config(None, ["train.lora.rnk=8"])


def test_lora_reference_shares_actor_model_and_equals_frozen_copy(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []

    def load(path: str, *_: Any) -> PreTrainedModel:
        loaded.append(path)
        return load_model(path)

    monkeypatch.setattr("paceline.training.lora.load_model", load)
    monkeypatch.setattr("paceline.training.single.load_onto", load)

    def parts(*settings: str, roles: tuple[Role, ...] = (Role.ACTOR, Role.REF)) -> Any:
        loaded.clear()
        return build_parts(
            roles, config(model, tmp_path, "algorithm.kl_coef=0.1", *settings), model, 1
        )

    shared = parts(*LORA)
    assert len(loaded) == 1, "one model for both roles"
    frozen = parts(roles=(Role.REF,))[Role.REF]
    assert len(loaded) == 1
    parts()
    assert len(loaded) == 2, "without LoRA, the reference is a separate copy"
    for step in range(3):
        shared[Role.ACTOR].update(
            replace(batch(), ref_logprobs=shared[Role.REF].logprobs(batch())), step
        )
    actor_engine = shared[Role.ACTOR]._actor.engine
    assert (shared[Role.REF].logprobs(batch()) == frozen.logprobs(batch())).all()
    moved = np.abs(actor_engine.logprobs(batch()) - frozen.logprobs(batch())).max()
    assert moved > 1e-2, "the actor did not change"


def run_with_model(model: str, reward_model: str, folder: Path, *settings: str) -> dict[str, Any]:
    small = [setting for setting in SMALL if not setting.startswith("reward.function")]
    paths = [f"model={model}", f"run_dir={folder}", f"reward.model={reward_model}"]
    return asyncio.run(train(load_config(None, [*paths, *small, *settings])))


@pytest.mark.slow
def test_reward_model_gives_same_scores_in_shared_and_separate_pool(
    model: str, reward_model: str, tmp_path: Path
) -> None:
    run_with_model(model, reward_model, tmp_path / "hybrid")
    run_with_model(model, reward_model, tmp_path / "separate", *SEPARATE, "placement.reward=reward")
    assert weights(tmp_path / "hybrid", 4) == weights(tmp_path / "separate", 4)
    assert all(row["reward/std"] > 0 for row in steps_of(tmp_path / "hybrid"))
    other = random_reward_model(tmp_path / "other", seed=1)
    run_with_model(model, other, tmp_path / "other_run")
    assert weights(tmp_path / "hybrid", 4) != weights(tmp_path / "other_run", 4)


@pytest.mark.parametrize(
    "settings",
    [
        [*LORA, "algorithm.kl_coef=0.1"],
        pytest.param(
            [
                *SEPARATE,
                "placement.reward=rollout",
                "schedule.max_staleness=2",
                "schedule.on_sync=swap",
            ],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["LoRA with a reference", "fully async"],
)
def test_reward_model_scores_every_group(
    settings: list[str], model: str, reward_model: str, tmp_path: Path
) -> None:
    summary = run_with_model(model, reward_model, tmp_path, *settings)
    assert summary["steps"] == 4 and not summary["ledger"]["dropped"]


def test_run_does_not_start_when_reward_model_has_no_score(model: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="sequence-classification"):
        run_with_model(model, model, tmp_path / "causal")
    assert not (tmp_path / "causal").exists()


def test_resume_fails_when_reward_model_changes(model: str, tmp_path: Path) -> None:
    scorer = random_reward_model(tmp_path / "scorer")
    run_with_model(model, scorer, tmp_path / "run", "steps=1")
    random_reward_model(tmp_path / "scorer", seed=1)
    with pytest.raises(CheckpointError, match="reward model: its content changed"):
        run_with_model(model, scorer, tmp_path / "run", "steps=2")
