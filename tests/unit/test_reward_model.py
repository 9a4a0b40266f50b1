"""The reward model: what it reads, how it scores, and what is refused."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DebertaV2Config

from paceline.config import load_config
from paceline.errors import ConfigError, ModelError, RewardError
from paceline.remote.thread import ThreadWorker
from paceline.reward.model import ModelReward, RewardModel, check_reward_model
from paceline.types import Prompt, Role, Trajectory
from paceline.workers.cluster import PlannedWorker
from paceline.workers.fit import needs
from tests.models import random_model, random_reward_model

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
ANSWERS = ["a", "a much longer answer", "", "abc", "two words"]
MESSAGES = [{"role": "user", "content": "sort 3 1 2="}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return random_reward_model(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return random_reward_model(tmp_path_factory.mktemp("chat"), chat_template=TEMPLATE)


@torch.no_grad()
def plain_score(folder: str, text: str, templated: bool = False) -> float:
    """One text, alone, through transformers' own forward."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    ids = AutoTokenizer.from_pretrained(folder)(
        text, add_special_tokens=not templated, return_tensors="pt"
    )["input_ids"]
    return float(model(ids).logits[0, 0])


@pytest.mark.parametrize("batch_tokens", [1, 60, 4096])
def test_scores_are_those_of_each_text_alone_however_they_are_batched(
    folder: str, batch_tokens: int
) -> None:
    found = RewardModel(folder, "float32", batch_tokens).score("sort 3 1 2=", MESSAGES, ANSWERS)
    expected = [plain_score(folder, f"sort 3 1 2={answer}") for answer in ANSWERS]
    assert found == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 4) for score in found}) == len(ANSWERS), (
        "a model that scores all alike proves nothing"
    )


def test_a_chat_template_is_the_reward_models_own_and_sees_the_messages(chat_folder: str) -> None:
    messages = [{"role": "system", "content": "be brief"}, *MESSAGES]
    found = RewardModel(chat_folder, "float32", 4096).score(
        "<policy's own rendering>", messages, ANSWERS
    )
    expected = [
        plain_score(
            chat_folder,
            f"system: be brief\nuser: sort 3 1 2=\nassistant: {answer}\n",
            templated=True,
        )
        for answer in ANSWERS
    ]
    assert found == pytest.approx(expected, abs=1e-5)


def test_without_a_pad_token_answers_are_scored_one_at_a_time(folder: str, tmp_path: Path) -> None:
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    model.config.pad_token_id = None
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    found = RewardModel(str(tmp_path), "float32", 4096).score("sort 3 1 2=", MESSAGES, ANSWERS)
    assert found == pytest.approx(
        [plain_score(folder, f"sort 3 1 2={answer}") for answer in ANSWERS], abs=1e-5
    )


def test_what_is_not_a_reward_model_is_refused(folder: str, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError,
        match="is Qwen2ForCausalLM; a reward model is a sequence-classification model with one label",
    ):
        check_reward_model(random_model(tmp_path / "causal"))
    with pytest.raises(ModelError, match="has 3 labels; a reward model has one"):
        check_reward_model(random_reward_model(tmp_path / "three", labels=3))
    with pytest.raises(ModelError, match="no model at"):
        check_reward_model("./nowhere")
    AutoModelForSequenceClassification.from_pretrained(folder).save_pretrained(tmp_path / "mute")
    with pytest.raises(ModelError, match="mute has no tokenizer"):
        check_reward_model(str(tmp_path / "mute"))


def test_a_text_too_long_or_a_score_that_is_no_number_is_a_reward_error(
    folder: str, chat_folder: str
) -> None:
    model = RewardModel(folder, "float32", 4096)
    with pytest.raises(RewardError, match=r"have \d{3} tokens, reward model \S+ reads at most 256"):
        model.score("x" * 300, MESSAGES, ["a"])
    with torch.no_grad():
        model._model.score.weight.fill_(float("nan"))
    with pytest.raises(RewardError, match="expected finite numbers"):
        model.score("x", MESSAGES, ["a"])
    strict = RewardModel(chat_folder, "float32", 4096)
    strict._tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(RewardError, match="refuses the conversation: no system role"):
        strict.score("x", MESSAGES, ["a"])


def test_the_client_sends_the_rows_messages_and_names_the_prompt_in_errors(
    chat_folder: str,
) -> None:
    texts = [Trajectory((), answer) for answer in ANSWERS]
    rows: list[tuple[Any, str | None, str]] = [
        ("hello", None, "user: hello\n"),
        ("hello", "be kind", "system: be kind\nuser: hello\n"),
        ([{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}, {"role": "user", "content": "three"}], None,
         "user: one\nassistant: two\nuser: three\n"),
        ([{"role": "system", "content": "own"}, {"role": "user", "content": "one"}], "be kind", "system: own\nuser: one\n"),
    ]  # fmt: skip

    async def scenario() -> None:
        worker = ThreadWorker(
            "reward", lambda: {Role.REWARD: RewardModel(chat_folder, "float32", 4096)}, ()
        )
        await worker.ready()
        for question, system, rendered in rows:
            prompt = Prompt("p:1", (1,), "as the policy saw it", {"question": question})
            found = await ModelReward(worker, "question", system).score(prompt, texts)
            assert found == pytest.approx(
                [
                    plain_score(chat_folder, f"{rendered}assistant: {answer}\n", templated=True)
                    for answer in ANSWERS
                ],
                abs=1e-5,
            )
        with pytest.raises(RewardError, match=r"prompt 'p:2': prompt and answer have \d+ tokens"):
            await ModelReward(worker, "question").score(
                Prompt("p:2", (1,), "", {"question": "x" * 300}), texts
            )
        await worker.close()

    asyncio.run(scenario())


def test_a_function_and_a_model_together_are_refused_naming_both() -> None:
    with pytest.raises(
        ConfigError, match=r"reward\.function = 'exact' and reward\.model = 'm' are both set"
    ):
        load_config(None, ["data.task=copy:3", "reward.function=exact", "reward.model=m"])


def test_a_reward_model_that_could_never_generate_has_its_place_in_the_plan(tmp_path: Path) -> None:
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
    found = needs(PlannedWorker("judges", (Role.REWARD,)), config, str(tmp_path))
    assert found[Role.REWARD].fixed == 4 * sum(p.numel() for p in model.parameters())
