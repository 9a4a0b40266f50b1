"""vLLM's OpenAI server, which `vllm serve` starts, serves what a run leaves."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from paceline.config import load_config
from paceline.data.tiny import make_tokenizer
from paceline.run import train
from paceline.training.export import export_model
from tests.architectures import tiny_architecture

PROMPT = [3, 5, 6, 7]
TIMEOUT_S = 240


def random_experts(folder: Path) -> str:
    """Save a mixture of experts, whose names in files and in memory differ."""
    tokenizer = make_tokenizer()
    wide = {"hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 64}
    tiny_architecture("qwen3_moe", vocab_size=len(tokenizer), **wide).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def ask(port: int, server: "subprocess.Popen[bytes]", body: dict[str, Any]) -> Any:
    """Return the reply to a completion request, once the server is ready."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return json.load(reply)
        except urllib.error.HTTPError:
            raise
        except OSError:
            assert server.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.5)


def test_exported_experts_are_served_as_transformers_generates(tmp_path: Path) -> None:
    settings = ["data.task=copy:3", "data.limit=256"]
    settings += ["steps=2", "groups_per_step=2", "group_size=4"]
    settings += ["train.learning_rate=1e-2", "rollout.max_response_length=8"]
    settings += [f"reward.function={Path(__file__).parents[1]}/rewards.py:letters"]
    model = random_experts(tmp_path / "model")
    asyncio.run(train(load_config(None, [f"model={model}", f"run_dir={tmp_path}/run", *settings])))
    folder = export_model(tmp_path / "run", max_shard_size="300KB").folder
    plain = AutoModelForCausalLM.from_pretrained(folder)
    expected = plain.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=12)[0]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The command `vllm` of the package for CPUs does not start.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--served-model-name",
        "trained",
        "--enforce-eager",
    ]
    command += ["--dtype", "float32", "--max-model-len", "128", "--kv-cache-memory-bytes", "64M"]
    quiet = {"VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1"}
    environment = os.environ | quiet | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        body = {"model": "trained", "prompt": PROMPT, "temperature": 0, "max_tokens": 12}
        choice = ask(port, server, body | {"return_token_ids": True})["choices"][0]
    finally:
        server.terminate()
        server.wait(60)
        print((tmp_path / "server.log").read_text(errors="replace")[-3000:])
    assert choice["token_ids"] == expected[len(PROMPT) :].tolist()
