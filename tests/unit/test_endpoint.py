"""OpenAI-compatible endpoint, driven by the real `openai` client: replies, errors, exact tokens."""

import asyncio
import json
import random
from typing import Any

import aiohttp
import openai
import pytest

from paceline.endpoint import server
from paceline.endpoint.agent import AgentProgram, RunModel
from paceline.endpoint.request import RequestError, read_chat, read_request
from paceline.endpoint.session import Chat, Session
from paceline.types import End, Sampling
from tests.chat_templates import TEMPLATES
from tests.endpoints import (
    LIMITS,
    PROMPT,
    USER,
    Engine,
    ask,
    assert_exact,
    episode,
    post,
    rows_of,
)

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
RAN = {"type": "function_call", "name": "add", "arguments": "{}", "call_id": "1"}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def test_conversation_is_one_row_of_exact_tokens() -> None:
    async def play(client: Any, row: dict[str, Any]) -> float:
        messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
        for _ in range(4):
            reply = await ask(client, messages)
            messages += [reply.choices[0].message, {"role": "user", "content": "again"}]
        return 0.25

    engine = Engine()
    trajectory = episode(play, engine)
    assert_exact(trajectory, engine)
    assert len(rows_of(trajectory)) == 1 and len(trajectory.turns) == 4
    assert (trajectory.reward, trajectory.end) == (0.25, End.DONE)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("seed", range(4))
def test_rows_are_exact_when_program_branches_and_retries(template: str, seed: int) -> None:
    async def play(client: Any) -> None:
        numbers = random.Random(seed)
        known: list[list[Any]] = [[USER]]  # histories that end with a message to respond to
        for _ in range(8):
            messages = numbers.choice([known[-1], numbers.choice(known)])
            reply = await ask(client, messages, n=numbers.choice([1, 1, 2]))
            for choice in reply.choices:
                said = choice.message.model_dump(exclude_none=numbers.random() < 0.5)
                follow = {"role": "user", "content": f"{numbers.randint(0, 9)}?"}
                known.append([*messages, said, follow])

    engine = Engine(template=template, seed=seed)
    trajectory = episode(play, engine)
    assert_exact(trajectory, engine)
    assert trajectory.text == engine.tokenizer.decode(
        trajectory.turns[-1].completion.tokens, skip_special_tokens=True
    )


def test_second_continuation_of_completion_begins_row_with_its_tokens() -> None:
    async def play(client: Any) -> None:
        said = (await ask(client, [USER])).choices[0].message
        for text in ("one", "two"):
            await ask(client, [USER, said, {"role": "user", "content": text}])

    engine = Engine()
    trajectory = episode(play, engine)
    assert_exact(trajectory, engine)
    assert [turn.restarts for turn in trajectory.turns] == [False, False, True]
    first = trajectory.turns[0].completion.tokens.tolist()
    prompt = list(trajectory.turns[2].prompt)
    start = len(trajectory.turns[0].prompt)
    assert prompt[start : start + len(first)] == first, "the completion was tokenized again"


def test_rewritten_history_begins_row() -> None:
    async def play(client: Any) -> None:
        await ask(client, [USER])
        other = {"role": "assistant", "content": "something else"}
        await ask(client, [USER, other, {"role": "user", "content": "and?"}])

    engine = Engine()
    trajectory = episode(play, engine)
    assert_exact(trajectory, engine)
    assert [turn.restarts for turn in trajectory.turns] == [False, True]


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_are_read_and_continued(stream: bool) -> None:
    async def play(client: Any) -> None:
        options: dict[str, Any] = {"tools": [ADD], "tool_choice": "auto"}
        if stream:
            message = await streamed(client, [USER], **options)
        else:
            reply = await ask(client, [USER], **options)
            assert reply.choices[0].finish_reason == "tool_calls"
            message = reply.choices[0].message.model_dump()
        assert message["content"] == "let me see"
        (call,) = message["tool_calls"]
        assert call["function"]["name"] == "add" and call["id"].startswith("call_")
        assert json.loads(call["function"]["arguments"]) == {"a": 1}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
        last = await ask(client, [USER, message, result], **options)
        assert last.choices[0].message.content == "it is 2"
        assert last.choices[0].finish_reason == "stop"

    engine = Engine(f"let me see {CALL}", "it is 2", template="chatml with tools")
    trajectory = episode(play, engine)
    assert_exact(trajectory, engine)
    assert len(rows_of(trajectory)) == 1
    assert '"add"' in engine.tokenizer.decode(engine.seen[0][0])


async def streamed(client: Any, messages: list[Any], **options: Any) -> dict[str, Any]:
    """Return the message that a client puts together from the chunks of a stream."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    usage = None
    chunks = await ask(
        client, messages, stream=True, stream_options={"include_usage": True}, **options
    )
    async for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            message["role"] = choice.delta.role or message["role"]
            message["content"] += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                if part.id:
                    call = {"id": part.id, "type": part.type, "function": {"arguments": ""}}
                    call["function"]["name"] = part.function.name
                    message["tool_calls"].append(call)
                function = message["tool_calls"][part.index]["function"]
                function["arguments"] += part.function.arguments
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    return message


def test_unreadable_call_is_text_and_choice_none_reads_no_calls() -> None:
    async def play(client: Any) -> None:
        for choice in ("auto", "none"):
            reply = await ask(client, [USER], tools=[ADD], tool_choice=choice)
            message = reply.choices[0].message
            assert message.tool_calls is None and "<tool_call>" in message.content

    episode(play, Engine("<tool_call>{oops</tool_call>", CALL, template="chatml with tools"))


def test_call_whose_name_is_not_valid_text_is_text_that_a_client_can_return() -> None:
    call = r'<tool_call>{"name": "\ud800"}</tool_call>'

    async def play(client: Any) -> None:
        message = await streamed(client, [USER], tools=[ADD])
        assert message["content"] == call
        await ask(client, [USER, message, USER], tools=[ADD])

    engine = Engine(call, template="chatml with tools")
    assert len(rows_of(episode(play, engine))) == 1


def test_options_of_request_shape_reply() -> None:
    async def play(client: Any) -> None:
        reply = await ask(client, [USER], stop=["END"], logprobs=True)
        assert reply.choices[0].message.content == "before "
        assert reply.choices[0].finish_reason == "stop"
        values = [token.logprob for token in reply.choices[0].logprobs.content]
        assert len(values) == reply.usage.completion_tokens and values[0] == -1
        reply = await ask(client, [USER], max_tokens=3, n=3, temperature=1.0, seed=7)
        assert [choice.index for choice in reply.choices] == [0, 1, 2]
        assert {choice.finish_reason for choice in reply.choices} == {"length"}
        assert [model.id async for model in client.models.list()] == ["policy"]

    engine = Engine("before END after", *["a long answer of many words"] * 3)
    trajectory = episode(play, engine)
    assert_exact(trajectory, engine)
    assert len(rows_of(trajectory)) == 4
    assert engine.asked[0]["stop"] == ("END",) and engine.asked[1]["max_new_tokens"] == 3


def test_field_without_value_is_accepted() -> None:
    async def play(client: Any) -> None:
        await ask(client, [USER], audio=None, reasoning_effort=None, temperature=None)
        await client.responses.create(model="policy", input="?", reasoning=None, text=None)

    assert len(episode(play, Engine()).turns) == 2


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("temperature", {"temperature": 0.3}),
        ("top_p", {"top_p": 0.5}),
        ("tool_choice", {"tools": [ADD], "tool_choice": "required"}),
        ("tools.0", {"tools": [{"type": "function", "function": {}}]}),
        ("parallel_tool_calls", {"parallel_tool_calls": False}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 3}),
        ("n", {"n": 0}),
        ("n", {"n": 1000}),
        ("stop.0", {"stop": [""]}),
        ("max_tokens", {"max_tokens": 0}),
        ("presence_penalty", {"presence_penalty": 0.5}),
        ("response_format.type", {"response_format": {"type": "json_object"}}),
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("best_of", {"extra_body": {"best_of": 2}}),
        ("messages", {"messages": []}),
        ("messages", {"messages": [{"role": "user", "content": "\ud800"}]}),
        ("messages", {"messages": [{"role": "assistant", "content": "I"}]}),
        ("messages.0.role", {"messages": [{"role": "robot", "content": "?"}]}),
        (
            "messages.0.content.0.type",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        ),
    ],
)
def test_bad_request_is_rejected_with_name_of_field(field: str, options: dict[str, Any]) -> None:
    async def play(env: dict[str, str]) -> None:
        # JSON of a plain client: openai refuses to send some of these.
        body = {"model": "policy", "messages": [USER]} | options
        body |= body.pop("extra_body", {})
        status, reply = await post(env, json.dumps(body).encode())
        assert (status, reply["error"]["param"]) == (400, field)
        assert reply["error"]["type"] == "invalid_request_error"
        assert reply["error"]["message"].startswith(field)
        status, _ = await post(env, json.dumps({"model": "policy", "messages": [USER]}).encode())
        assert status == 200, "the session ended with a bad request"

    episode(play, Engine())


def test_list_that_is_too_long_is_not_called_text_that_is_expected() -> None:
    with pytest.raises(RequestError, match=r"^stop: List should have at most 16 items"):
        read_request(json.dumps({"model": "m", "messages": [USER], "stop": ["a"] * 17}).encode())


def test_client_that_waits_before_its_body_is_told_to_continue() -> None:
    async def play(env: dict[str, str]) -> None:
        headers = {"Authorization": f"Bearer {env['OPENAI_API_KEY']}"}
        url, body = f"{env['OPENAI_BASE_URL']}/chat/completions", {"model": "m", "messages": [USER]}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(url, json=body, expect100=True) as reply,
        ):
            assert reply.status == 200

    assert len(episode(play, Engine()).turns) == 1


def test_wrong_key_body_and_path_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_BODY", 2000)

    async def play(client: Any, env: dict[str, str]) -> None:
        other = client.with_options(api_key="pl-guess")
        with pytest.raises(openai.AuthenticationError, match="unknown API key"):
            await ask(other, [USER])
        large = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 3000}]})
        status, reply = await post(env, large.encode())
        assert status == 413 and "2000 bytes" in reply["error"]["message"]
        with pytest.raises(openai.NotFoundError, match="POST /v1/chat/completions"):
            await client.embeddings.create(model="policy", input="hello")
        for body, problem in ((b"{", "is not JSON"), (b"[]", "is not a JSON object")):
            for path in ("/chat/completions", "/responses"):
                status, reply = await post(env, body, path)
                assert status == 400 and problem in reply["error"]["message"]
        await ask(client, [USER])

    episode(play, Engine())


def test_responses_api_continues_exact_tokens_with_tools() -> None:
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}

    async def play(client: Any) -> None:
        items: list[Any] = [{"role": "user", "content": "1 + 1?"}]
        options = {"model": "policy", "instructions": "Add.", "tools": [tool]}
        first = await client.responses.create(input=items, **options)
        call = first.output[-1]
        assert (call.type, call.name) == ("function_call", "add")
        assert json.loads(call.arguments) == {"a": 1}
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
        items += [*first.output, result]
        second = await client.responses.create(input=items, **options)
        assert second.output_text == "it is 2" and second.status == "completed"
        assert second.usage.total_tokens == sum(map(len, engine.seen[1]))
        items += [*second.output, {"role": "user", "content": "and?"}]
        third = await client.responses.create(input=items, max_output_tokens=2, **options)
        assert third.incomplete_details.reason == "max_output_tokens"

    engine = Engine(f"see {CALL}", "it is 2", "three is more", template="chatml with tools")
    trajectory = episode(play, engine)
    assert_exact(trajectory, engine)
    assert len(rows_of(trajectory)) == 1


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("stream", {"stream": True}),
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("input.0.type", {"input": [{"type": "reasoning"}]}),
        ("input.0.role", {"input": [{"role": "robot", "content": "?"}]}),
        ("input.0.role", {"instructions": "!", "input": [{"role": "robot", "content": "?"}]}),
        ("input.0.content", {"instructions": "!", "input": [{"role": "user", "content": 5}]}),
        ("input.2.arguments", {"instructions": "!", "input": [USER, RAN, RAN | {"arguments": 5}]}),
        ("input.2.call_id", {"input": [USER, RAN, RAN | {"call_id": 5}]}),
        ("input.2.output", {"input": [USER, RAN, {"type": "function_call_output", "output": 5}]}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("temperature", {"temperature": 0.3}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tools.0.type", {"tools": [{"type": "web_search"}]}),
    ],
)
def test_bad_responses_request_is_rejected_with_name_of_field(
    field: str, options: dict[str, Any]
) -> None:
    async def play(client: Any, env: dict[str, str]) -> None:
        body = {"model": "policy", "input": "hello"} | options
        status, reply = await post(env, json.dumps(body).encode(), "/responses")
        assert (status, reply["error"]["param"]) == (400, field)
        assert reply["error"]["message"].startswith(field)
        await ask(client, [USER])

    episode(play, Engine())


def test_request_is_rejected_when_episode_ends_while_its_body_arrives() -> None:
    engine = Engine()
    model = RunModel(engine, Sampling(8), LIMITS.max_length)
    request = read_chat({"model": "policy", "messages": [USER]})

    async def run() -> None:
        session = Session(Chat(engine.tokenizer), model)
        await session.close()
        with pytest.raises(RequestError, match="the episode has ended"):
            await session.complete(request)

    asyncio.run(run())
    assert not engine.asked


def test_server_closes_when_episode_ends_meanwhile() -> None:
    engine = Engine()
    model = RunModel(engine, Sampling(8), LIMITS.max_length)

    async def run() -> None:
        served = server.EndpointServer("policy")
        await served.start()

        class Ending(Session):
            async def close(self) -> None:
                await served.end(other)

        served.open(Ending(Chat(engine.tokenizer), model))
        other = served.open(Session(Chat(engine.tokenizer), model))
        await served.close()
        with pytest.raises(OSError):
            await asyncio.open_connection(server.HOST, served.port)

    asyncio.run(run())


def test_connection_without_key_ends_at_deadline_or_when_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(server, "STRANGER_TIMEOUT_S", 300.0)

    async def run() -> None:
        engine = Engine()
        endpoint = server.EndpointServer("policy")
        await endpoint.start()
        silent = [await asyncio.open_connection(server.HOST, endpoint.port) for _ in range(4)]
        async with asyncio.timeout(60):
            assert await silent[0][0].read() == b"", "the oldest connection did not give way"
        agent = AgentProgram("agent", play, engine.tokenizer, Sampling(64), LIMITS)
        agent._server = endpoint
        agent._client = openai.AsyncOpenAI(base_url=endpoint.url, api_key="unset")
        agent._disconnect = agent._client.close
        await agent.run(PROMPT, engine)
        monkeypatch.setattr(server, "STRANGER_TIMEOUT_S", 0.05)
        late = await asyncio.open_connection(server.HOST, endpoint.port)
        async with asyncio.timeout(60):
            assert await late[0].read() == b"", "a silent connection stays"
        for _, writer in [*silent, late]:
            writer.close()
        await agent.close()

    async def play(client: Any) -> None:
        await ask(client, [USER])

    asyncio.run(run())
