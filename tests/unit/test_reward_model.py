"""Reward models: input text, batching, scores, and rejected models and inputs."""

import asyncio
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DebertaV2Config

from paceline.config import load_config
from paceline.data.tiny_reward import resolve_reward_model
from paceline.errors import ConfigError, ModelError, RewardError
from paceline.remote.thread import ThreadWorker
from paceline.reward.model import ModelReward, RewardModel, check_reward_model
from paceline.types import Prompt, Role, Trajectory
from paceline.workers.cluster import PlannedWorker
from paceline.workers.phase_memory import Models, WorkerMemory
from tests.models import random_model, random_reward_model

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
COMPLETIONS = ["a", "a much longer completion", "", "abc", "two words"]
MESSAGES = [{"role": "user", "content": "sort 3 1 2="}]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return random_reward_model(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def chat_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return random_reward_model(tmp_path_factory.mktemp("chat"), chat_template=TEMPLATE)


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@cache
def plain_model(model_dir: str) -> tuple[Any, Any]:
    return (
        AutoModelForSequenceClassification.from_pretrained(model_dir),
        AutoTokenizer.from_pretrained(model_dir),
    )


@torch.no_grad()
def plain_score(model_dir: str, text: str, templated: bool = False) -> float:
    """Score one text alone with the forward pass of transformers."""
    model, tokenizer = plain_model(model_dir)
    ids = tokenizer(text, add_special_tokens=not templated, return_tensors="pt")["input_ids"]
    return float(model(ids).logits[0, 0])


@pytest.mark.parametrize("batch_tokens", [1, 60, 4096])
def test_reward_model_scores_each_text_alike_in_any_batch(
    model_dir: str, batch_tokens: int
) -> None:
    found = RewardModel(model_dir, "float32", batch_tokens).score(
        "sort 3 1 2=", MESSAGES, COMPLETIONS
    )
    expected = [plain_score(model_dir, f"sort 3 1 2={completion}") for completion in COMPLETIONS]
    assert found == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 4) for score in found}) == len(COMPLETIONS), (
        "equal scores would prove nothing"
    )


def test_reward_model_uses_its_own_chat_template_for_messages(chat_dir: str) -> None:
    messages = [{"role": "system", "content": "be brief"}, *MESSAGES]
    found = RewardModel(chat_dir, "float32", 4096).score(
        "<rendered for the policy>", messages, COMPLETIONS
    )
    expected = [
        plain_score(
            chat_dir,
            f"system: be brief\nuser: sort 3 1 2=\nassistant: {completion}\n",
            templated=True,
        )
        for completion in COMPLETIONS
    ]
    assert found == pytest.approx(expected, abs=1e-5)


def test_reward_model_scores_one_by_one_without_pad_token(model_dir: str, tmp_path: Path) -> None:
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(model_dir),
        AutoTokenizer.from_pretrained(model_dir),
    )
    model.config.pad_token_id = None
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    found = RewardModel(str(tmp_path), "float32", 4096).score("sort 3 1 2=", MESSAGES, COMPLETIONS)
    assert found == pytest.approx(
        [plain_score(model_dir, f"sort 3 1 2={completion}") for completion in COMPLETIONS], abs=1e-5
    )


def test_check_rejects_model_that_is_not_reward_model(model_dir: str, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError,
        match="is Qwen2ForCausalLM; expected a sequence-classification model with one label",
    ):
        check_reward_model(random_model(tmp_path / "causal"))
    with pytest.raises(ModelError, match="has 3 labels; expected one"):
        check_reward_model(random_reward_model(tmp_path / "three", labels=3))
    with pytest.raises(ModelError, match="no such file or directory"):
        check_reward_model("./nowhere")
    AutoModelForSequenceClassification.from_pretrained(model_dir).save_pretrained(
        tmp_path / "no_tokenizer"
    )
    with pytest.raises(ModelError, match="no_tokenizer has no tokenizer"):
        check_reward_model(str(tmp_path / "no_tokenizer"))


def test_reward_model_raises_when_text_is_too_long(model_dir: str) -> None:
    model = RewardModel(model_dir, "float32", 4096)
    with pytest.raises(RewardError, match=r"have \d{3} tokens; reward model \S+ reads at most 256"):
        model.score("x" * 300, MESSAGES, ["a"])


def test_reward_model_raises_when_score_is_not_finite(model_dir: str) -> None:
    model = RewardModel(model_dir, "float32", 4096)
    with torch.no_grad():
        model._model.score.weight.fill_(float("nan"))
    with pytest.raises(RewardError, match="expected finite numbers"):
        model.score("x", MESSAGES, ["a"])


def test_reward_model_raises_when_chat_template_rejects_conversation(chat_dir: str) -> None:
    strict = RewardModel(chat_dir, "float32", 4096)
    strict._tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(RewardError, match="rejects the conversation: no system role"):
        strict.score("x", MESSAGES, ["a"])


def test_model_reward_sends_messages_of_row(chat_dir: str) -> None:
    texts = [Trajectory((), completion) for completion in COMPLETIONS]
    rows: list[tuple[Any, str | None, str]] = [
        ("hello", None, "user: hello\n"),
        ("hello", "be kind", "system: be kind\nuser: hello\n"),
        (
            [message("user", "one"), message("assistant", "two"), message("user", "three")],
            None,
            "user: one\nassistant: two\nuser: three\n",
        ),
        (
            [message("system", "own"), message("user", "one")],
            "be kind",
            "system: own\nuser: one\n",
        ),
    ]

    async def scenario() -> None:
        worker = ThreadWorker(
            "reward", lambda: {Role.REWARD: RewardModel(chat_dir, "float32", 4096)}, ()
        )
        await worker.ready()
        for question, system, rendered in rows:
            prompt = Prompt("p:1", (1,), "as the policy saw it", {"question": question})
            found = await ModelReward(worker, "question", system).score(prompt, texts)
            assert found == pytest.approx(
                [
                    plain_score(chat_dir, f"{rendered}assistant: {completion}\n", templated=True)
                    for completion in COMPLETIONS
                ],
                abs=1e-5,
            )
        with pytest.raises(
            RewardError, match=r"prompt 'p:2': prompt and completion have \d+ tokens"
        ):
            await ModelReward(worker, "question").score(
                Prompt("p:2", (1,), "", {"question": "x" * 300}), texts
            )
        await worker.close()

    asyncio.run(scenario())


def test_config_rejects_reward_function_together_with_reward_model() -> None:
    with pytest.raises(
        ConfigError, match=r"reward\.function = 'exact' and reward\.model = 'm' are both set"
    ):
        load_config(None, ["data.task=copy:3", "reward.function=exact", "reward.model=m"])


def test_estimate_covers_reward_model_of_encoder_architecture(tmp_path: Path) -> None:
    shape = DebertaV2Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=128,
        num_labels=1,
    )
    model = AutoModelForSequenceClassification.from_config(shape)
    model.save_pretrained(tmp_path)
    config = load_config(None, [f"reward.model={tmp_path}"])
    models = Models.of(config, shape)
    found = WorkerMemory(PlannedWorker("reward", (Role.REWARD,)), config, models).peak()
    assert found.fixed == 4 * sum(p.numel() for p in model.parameters())


def test_tiny_reward_model_scores_completions_differently(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    name = resolve_reward_model("tiny")
    assert resolve_reward_model("tiny") == name, "it is created once"
    scores = RewardModel(name, "float32", 4096).score("sort 3 1 2=", MESSAGES, COMPLETIONS)
    assert len({round(score, 1) for score in scores}) > 2
