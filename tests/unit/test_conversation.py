"""Conversations: exact tokens in every chat format, ends with a reason, environments that fail."""

import asyncio
import random
import re
import sys
import time
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from paceline.data.prompts import DataSettings
from paceline.environment.conversation import Limits
from paceline.environment.protocol import Message, Reply
from paceline.errors import ConfigError, RolloutError
from paceline.rollout.environment import open_environment
from paceline.training.assembly import assemble
from paceline.types import Batch, Completion, End, Finish, Group, Prompt, Trajectory
from tests.chat_templates import END, TEMPLATES, tokenizer_of
from tests.episodes import DATA
from tests.exceptions import Panic, Speechless

LIMITS = Limits(max_turns=6, max_length=4000, timeout_s=30.0)
ROW = {"prompt": "What is it?", "answer": "42"}


def completion(tokens: Sequence[int], finish: Finish = Finish.STOP) -> Completion:
    count = len(tokens)
    return Completion(
        np.array(tokens, np.int32),
        np.linspace(-1, -2, count, dtype=np.float32),
        np.arange(count, dtype=np.int32),
        finish,
    )


class Model:
    """Returns the given completions and records what it was given."""

    def __init__(self, *completions: Completion) -> None:
        self.waiting = list(completions)
        self.contexts: list[tuple[int, ...]] = []

    async def __call__(self, context: tuple[int, ...]) -> Completion:
        self.contexts.append(context)
        return self.waiting.pop(0)


class Base:
    closed = 0

    async def reset(self, row: Mapping[str, Any]) -> Any:
        return None

    async def step(self, message: Message) -> Any:
        return Reply("no, try again", reward=0.25)

    async def close(self) -> None:
        Base.closed += 1


def play(
    environment: Any, model: Model, template: str = "chatml", limits: Limits = LIMITS
) -> Trajectory:
    tokenizer = tokenizer_of(template)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": ROW["prompt"]}], tokenize=False, add_generation_prompt=True
    )
    prompt = Prompt("q", tuple(tokenizer.encode(text, add_special_tokens=False)), text, ROW)
    loop = open_environment(environment, tokenizer, DATA, limits)
    trajectory = asyncio.run(loop.run(prompt, model))
    assert isinstance(trajectory, Trajectory)
    return trajectory


def said(text: str, template: str = "chatml") -> Completion:
    tokens = tokenizer_of(template).encode(text, add_special_tokens=False)
    return completion(tokens, Finish.STOP)


def random_text(numbers: random.Random, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return sampled tokens, which are rarely those that the tokenizer makes of their text."""
    usual = tokenizer.encode(
        "the answer is 42, because six times seven? ok", add_special_tokens=False
    )
    letters = tokenizer.encode("".join(" a7t?\n"), add_special_tokens=False)
    return [numbers.choice([*usual, *letters]) for _ in range(numbers.randint(1, 12))]


def stripped(text: str) -> str:
    """Return a message as the template with reasoning writes it before a later user message."""
    return text.split("</think>")[-1].lstrip("\n")


def splits(texts: Sequence[str], replies: Sequence[Sequence[Message]]) -> int:
    """Return how often the template with reasoning rewrites what the model has seen."""
    count, seen = 0, []
    for text, reply in zip(texts[:-1], replies, strict=False):
        seen.append(text)
        if any(message["role"] == "user" for message in reply):
            count += any(stripped(text) != text for text in seen)
            seen = []
    return count


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("template", TEMPLATES)
def test_trained_tokens_are_sampled_ones_in_every_chat_format(template: str, seed: int) -> None:
    numbers, tokenizer = random.Random(seed), tokenizer_of(template)
    end = tokenizer.convert_tokens_to_ids(END.get(template, "<|im_end|>"))
    turns = numbers.randint(1, 6)
    sampled = [random_text(numbers, tokenizer) for _ in range(turns)]
    if template == "thinking":
        thought = tokenizer.encode("<think>six times seven</think>", add_special_tokens=False)
        sampled = [[*(thought if numbers.random() < 0.6 else []), *tokens] for tokens in sampled]
    completions = [completion([*tokens, end]) for tokens in sampled]
    replies = [
        [
            {"role": role, "content": f"reply {numbers.randint(0, 99)}"}
            for role in numbers.choice([("user",), ("tool",), ("tool", "tool")])
        ]
        for _ in range(turns)
    ]

    class Scripted(Base):
        def __init__(self) -> None:
            self.replies = list(replies)

        async def step(self, message: Message) -> Reply:
            return Reply(self.replies.pop(0), done=len(self.replies) == 0)

    model = Model(*completions)
    trajectory = play(Scripted, model, template)
    assert trajectory.end is End.DONE and len(trajectory.turns) == turns
    texts = [tokenizer.decode(tokens) for tokens in sampled]
    expected = splits(texts, replies) if template == "thinking" else 0
    assert len(trajectory.rows) == 1 + expected
    prompt = Prompt("q", (), "", ROW)
    batch = assemble([Group(0, prompt, (trajectory.scored(1.0),), 0.0, 0.0)])
    trained = np.concatenate([c.tokens for c in completions])
    assert np.array_equal(batch.tokens[batch.mask], trained), "other tokens are trained on"
    assert np.array_equal(
        batch.logprobs[batch.mask], np.concatenate([c.logprobs for c in completions])
    )
    check_rows(batch, trajectory, model.contexts)
    # A row says what the template says when its last completion ends.
    messages: list[dict[str, str]] = [{"role": "user", "content": ROW["prompt"]}]
    for text, reply in zip(texts, replies, strict=True):
        messages += [{"role": "assistant", "content": text}, *reply]
    ends = np.cumsum([len(row) for row in trajectory.rows])
    for row, last in enumerate(ends):
        said = sum(1 + len(reply) for reply in replies[: last - 1])
        whole = tokenizer.apply_chat_template(messages[: said + 2], tokenize=False)
        seen = tokenizer.decode(batch.tokens[slice(*batch.offsets[row : row + 2])].tolist())
        # Mistral's template writes a space before a completion, which the model may not sample.
        same = whole.replace("[/INST] ", "[/INST]").replace("[/TOOL_RESULTS] ", "[/TOOL_RESULTS]")
        assert (same if template == "mistral" else whole).rstrip("\n") == seen.rstrip("\n")


def check_rows(batch: Batch, trajectory: Trajectory, contexts: Sequence[tuple[int, ...]]) -> None:
    """Check that each context is the start of its row, and that the mask is its completion."""
    given = iter(contexts)
    for start, row in zip(batch.offsets[:-1], trajectory.rows, strict=True):
        at = int(start)
        for turn in row:
            begun, at = at, at + len(turn.prompt)
            assert tuple(batch.tokens[start:at].tolist()) == next(given)
            assert not batch.mask[begun:at].any()
            begun, at = at, at + len(turn.completion)
            assert batch.mask[begun:at].all()
            assert np.array_equal(batch.tokens[begun:at], turn.completion.tokens)
    assert at == batch.num_tokens and next(given, None) is None


def test_end_of_turn_is_added_when_model_did_not_sample_it() -> None:
    model = Model(said("41"), said("42<|im_end|>"))
    play(Base, model, limits=Limits(2, 4000, 30.0))
    tokenizer = tokenizer_of("chatml")
    assert tokenizer.decode(model.contexts[1]).endswith(
        "41<|im_end|>\n<|im_start|>user\nno, try again<|im_end|>\n<|im_start|>assistant\n"
    )


def test_other_end_token_is_not_followed_by_usual_one() -> None:
    model = Model(said("41<|eom_id|>", "llama 3"), said("42<|eot_id|>", "llama 3"))
    play(Base, model, "llama 3", Limits(2, 4000, 30.0))
    assert "41<|eom_id|><|start_header_id|>user" in tokenizer_of("llama 3").decode(
        model.contexts[1]
    )


def test_turn_restarts_when_template_removes_reasoning() -> None:
    thought = "<think>six times seven</think>41<|im_end|>"
    model = Model(said(thought), said("42<|im_end|>"))
    trajectory = play(Base, model, "thinking", Limits(2, 4000, 30.0))
    assert [turn.restarts for turn in trajectory.turns] == [False, True]
    assert trajectory.turns[1].prompt == model.contexts[1]
    seen = tokenizer_of("thinking").decode(model.contexts[1])
    assert "41<|im_end|>" in seen and "six times seven" not in seen


def test_episode_continues_when_rewritten_context_is_short_enough() -> None:
    thought = said("<think>six times seven</think>41<|im_end|>")
    limit = Limits(6, 200, 30.0)
    kept = play(Base, Model(*[thought] * 6), limits=limit)
    rewritten = play(Base, Model(*[thought] * 6), "thinking", limit)
    assert kept.end is End.CONTEXT and len(kept.turns) < len(rewritten.turns)


def test_reasoning_is_kept_when_tool_replies() -> None:
    class Tool(Base):
        async def step(self, message: Message) -> Reply:
            return Reply([{"role": "tool", "content": "7"}], done="42" in message["content"])

    thought = "<think>six times seven</think>41<|im_end|>"
    model = Model(said(thought), said("42<|im_end|>"))
    assert len(play(Tool, model, "thinking").turns) == 2
    assert "six times seven" in tokenizer_of("thinking").decode(model.contexts[1])


def test_episode_ends_after_max_turns_with_reward_of_each() -> None:
    trajectory = play(Base, Model(*[said("1<|im_end|>")] * 6))
    assert trajectory.end is End.TURNS and trajectory.total_reward == 6 * 0.25


def test_episode_ends_when_completion_is_truncated() -> None:
    long = completion([5] * 9, Finish.LENGTH)
    trajectory = play(Base, Model(said("1<|im_end|>"), long))
    assert trajectory.end is End.LENGTH and len(trajectory.turns) == 2


def test_episode_ends_when_context_is_full() -> None:
    short = Limits(6, len(tokenizer_of("chatml").encode("What is it?")) + 60, 30.0)
    trajectory = play(Base, Model(*[said("1<|im_end|>")] * 6), limits=short)
    assert trajectory.end is End.CONTEXT and 1 <= len(trajectory.turns) < 6


class Page(Base):
    async def step(self, message: Message) -> Any:
        return Reply("<p>some words</p> " * 500_000)


def test_episode_ends_soon_when_observation_has_megabytes() -> None:
    begun = time.process_time()
    trajectory = play(Page, Model(said("1<|im_end|>")))
    assert (trajectory.end, len(trajectory.turns)) == (End.CONTEXT, 1)
    assert time.process_time() - begun < 2


def test_first_messages_come_from_reset() -> None:
    class Greeting(Base):
        async def reset(self, row: Mapping[str, Any]) -> Any:
            return [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]

    model = Model(*[said("1<|im_end|>")] * 6)
    play(Greeting, model)
    assert tokenizer_of("chatml").decode(model.contexts[0]).startswith("<|im_start|>system\nbe br")


class Broken(Base):
    async def step(self, message: Message) -> Any:
        return {"messages": 1}


class Failing(Base):
    async def step(self, message: Message) -> Any:
        raise KeyError("no such tool")


class Infinite(Base):
    async def step(self, message: Message) -> Any:
        return Reply("x", reward=float("inf"))


class Silent(Base):
    async def step(self, message: Message) -> Any:
        return Reply()


class Blank(Base):
    async def step(self, message: Message) -> Any:
        return Reply(" \n")


class Hanging(Base):
    async def step(self, message: Message) -> Any:
        await asyncio.Event().wait()


class Exiting(Base):
    async def step(self, message: Message) -> Any:
        sys.exit(0)


class Cancelling(Base):
    async def step(self, message: Message) -> Any:
        task = asyncio.ensure_future(asyncio.Event().wait())
        task.cancel()
        await task


class NoMessages(Base):
    async def step(self, message: Message) -> Any:
        return Reply(None)  # type: ignore[arg-type]


class TextReward(Base):
    async def step(self, message: Message) -> Any:
        return Reply("x", "1")  # type: ignore[arg-type]


class ManyDone(Base):
    async def step(self, message: Message) -> Any:
        return Reply("x", done=np.array([True, False]))  # type: ignore[arg-type]


class NoArgument(Base):
    async def step(self) -> Any:  # type: ignore[override]
        return Reply("x")


class TextReset(Base):
    async def reset(self, row: Mapping[str, Any]) -> Any:
        return "hello"


class NumberReset(Base):
    async def reset(self, row: Mapping[str, Any]) -> Any:
        return 5


class Indescribable(Base):
    async def step(self, message: Message) -> Any:
        raise Speechless


class Panicking(Base):
    async def step(self, message: Message) -> Any:
        raise Panic("index out of bounds")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (Panicking, r"step\(\) raised Panic: index out of bounds .*\.py:\d+"),
        (Indescribable, r"step\(\) raised Speechless: \(its text cannot be shown.*\.py:\d+"),
        (Exiting, r"step\(\) raised SystemExit: 0 .*test_conversation.py:\d+"),
        (Cancelling, r"step\(\) raised CancelledError"),
        (NoMessages, r"step\(\) .* Reply.messages = None; expected .*test_conversation.py:\d+"),
        (TextReward, r"step\(\) .* Reply.reward = '1'; expected .*test_conversation.py:\d+"),
        (ManyDone, r"step\(\) raised ValueError: .*test_conversation.py:\d+"),
        (NoArgument, r"step\(\) raised TypeError: .* takes 1 positional argument"),
        (TextReset, r"reset\(\) returned 'hello'; expected a list of messages, or None"),
        (NumberReset, r"reset\(\) returned 5; expected a list of messages, or None"),
        (Broken, r"step\(\) returned {'messages': 1}; expected a Reply"),
        (Failing, r"step\(\) raised KeyError: 'no such tool' .*test_conversation.py:\d+"),
        (Infinite, r"step\(\) returned the reward inf; expected a finite number"),
        (Silent, r"step\(\) returned messages that are wrong: the list of messages is empty"),
        (Blank, r"step\(\) returned messages that are wrong: the text is empty"),
        (Hanging, r"step\(\) took longer than rollout.environment_timeout_s = 0.2 s"),
    ],
)
def test_environment_that_fails_is_closed_and_named(environment: Any, message: str) -> None:
    before = Base.closed
    limits = Limits(6, 4000, 0.2 if environment is Hanging else 30.0)
    with pytest.raises(RolloutError, match=f"environment {environment.__name__}, .*{message}"):
        play(environment, Model(said("1<|im_end|>")), limits=limits)
    assert Base.closed == before + 1


@pytest.mark.parametrize(
    "reward", [np.float32(0.5), np.array(0.5), torch.tensor(0.5), Fraction(1, 2)]
)
def test_reward_of_other_number_type_becomes_float(reward: Any) -> None:
    reply = Reply(({"role": "user", "content": text} for text in "ab"), reward, np.True_)  # type: ignore[arg-type]
    assert (type(reply.reward), reply.reward, reply.done) == (float, 0.5, True)
    assert len(reply.messages) == 2 and isinstance(reply.messages, list)


def test_messages_that_template_rejects_fail_trajectory(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of("chatml")
    strict = "{% if messages|length > 2 %}{{ raise_exception('too many') }}{% endif %}"
    monkeypatch.setattr(tokenizer, "chat_template", strict + tokenizer.chat_template)
    with pytest.raises(RolloutError, match=r"'q': the chat template raised .*: too many"):
        play(Base, Model(said("1<|im_end|>")))


def test_cancelled_episode_closes_its_environment() -> None:
    before, tokenizer = Base.closed, tokenizer_of("chatml")
    loop = open_environment(Hanging, tokenizer, DATA, LIMITS)  # type: ignore[arg-type]
    prompt = Prompt("q", (), "", ROW)

    async def main() -> None:
        episode = asyncio.create_task(loop.run(prompt, Model(said("1<|im_end|>"))))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode

    asyncio.run(main())
    assert Base.closed == before + 1


class NoReset:
    async def step(self, message: Message) -> Reply:
        return Reply()


class PlainClose(Base):
    def close(self) -> None:  # type: ignore[override]
        return


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(1), asyncio.CancelledError()])
def test_episode_counts_and_warns_when_close_fails(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Base):
        async def step(self, message: Message) -> Any:
            return Reply(done=True)

        async def close(self) -> None:
            raise error

    assert play(Failing, Model(said("1<|im_end|>"))).end is End.DONE
    expected = rf"close\(\) raised {type(error).__name__}.*test_conversation.py:\d+"
    assert re.search(expected, caplog.text)


def test_environment_is_rejected_when_close_is_not_async() -> None:
    with pytest.raises(ConfigError, match="PlainClose' has no method `async def close`"):
        open_environment(PlainClose, tokenizer_of("chatml"), DATA, LIMITS)  # type: ignore[arg-type]


def test_environment_is_rejected_when_method_or_chat_template_is_missing() -> None:
    tokenizer = tokenizer_of("chatml")
    with pytest.raises(ConfigError, match="NoReset' has no method `async def reset`"):
        open_environment(NoReset, tokenizer, DATA, LIMITS)  # type: ignore[arg-type]
    plain = DataSettings(path="rows.jsonl", chat=False)
    with pytest.raises(ConfigError, match="a conversation needs a chat template"):
        open_environment(Base, tokenizer, plain, LIMITS)  # type: ignore[arg-type]
