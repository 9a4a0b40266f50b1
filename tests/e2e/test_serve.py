"""`paceline serve`: a model behind the endpoint, used by the real client."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import openai
import pytest
from typer.testing import CliRunner

from paceline.cli import app


@pytest.fixture(scope="module")
def client(model: str) -> Iterator[openai.OpenAI]:
    command = [sys.executable, "-m", "paceline", "serve", model, "placement.threads=1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        given = {}
        for line in process.stdout:
            if "Ctrl-C" in line:
                break
            name, _, value = line.removeprefix("export ").strip().partition("=")
            given[name] = value
        key = given["OPENAI_API_KEY"]
        yield openai.OpenAI(base_url=given["OPENAI_BASE_URL"], api_key=key, max_retries=0)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGINT


def texts(client: openai.OpenAI, **options: object) -> list[str | None]:
    reply = client.chat.completions.create(
        model="any",
        messages=[{"role": "user", "content": "hello"}],
        **{"max_tokens": 8} | options,  # type: ignore[call-overload]
    )
    return [choice.message.content for choice in reply.choices]


def test_served_model_samples_as_request_says(client: openai.OpenAI, model: str) -> None:
    sampled = texts(client, n=3, seed=5, temperature=1.5)
    assert sampled == texts(client, n=3, seed=5, temperature=1.5), "the seed has no effect"
    assert len(set(sampled)) > 1, "all choices have the same seed"
    greedy = texts(client, n=2, temperature=0)
    assert greedy[0] == greedy[1] == texts(client, temperature=0)[0]
    chunks = client.chat.completions.create(
        model="any",
        messages=[{"role": "user", "content": "hello"}],
        temperature=0,
        max_tokens=8,
        stream=True,
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == greedy[0]
    assert [os.path.basename(each.id) for each in client.models.list()] == [os.path.basename(model)]


def test_served_model_rejects_long_conversation(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="expected fewer than") as failed:
        client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "long " * 500}]
        )
    assert failed.value.code == "context_length_exceeded"


def test_served_model_is_greedy_at_temperatures_near_zero(client: openai.OpenAI) -> None:
    greedy = texts(client, temperature=0)
    for temperature in (1e-6, 1e-38, 1e-40, 1e-45):
        assert texts(client, temperature=temperature) == greedy


@pytest.mark.parametrize("port", ["-5", "65536"])
def test_serve_rejects_port_that_cannot_exist(port: str) -> None:
    result = CliRunner().invoke(app, ["serve", "tiny", "--port", port])
    assert result.exit_code == 2 and "--port" in result.output
