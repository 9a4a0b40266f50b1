"""Train engines on one GPU: tokens per second of whole updates, single device against FSDP2 with one rank, and what offload moves.

python benchmarks/gpu_backends.py [results.json]
"""

import json
import os
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

from paceline.algo.loss import PolicyLoss
from paceline.algo.settings import AlgorithmSettings
from paceline.train.engine import TrainEngine
from paceline.train.fsdp import Fsdp
from paceline.train.settings import TrainSettings
from paceline.train.single import SingleDevice
from paceline.types import Batch

ROWS, PROMPT, ANSWER = 64, 128, 384
SHAPE: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip  # Qwen2.5-0.5B


def batch() -> Batch:
    rng = np.random.default_rng(0)
    total = ROWS * (PROMPT + ANSWER)
    mask = np.arange(total) % (PROMPT + ANSWER) >= PROMPT
    zeros = np.zeros(total, np.float32)
    return Batch(
        tokens=rng.integers(0, 150000, total).astype(np.int32),
        lengths=np.full(ROWS, PROMPT + ANSWER, np.int32),
        mask=mask,
        logprobs=zeros - 12 * mask.astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        rewards=zeros[:ROWS],
        groups=np.arange(ROWS, dtype=np.int32) // 8,
        advantages=np.where(mask, rng.standard_normal(total), 0).astype(np.float32),
    )


def measure(engine: TrainEngine) -> dict[str, float]:
    data, loss, times = batch(), PolicyLoss(AlgorithmSettings()), []
    for _ in range(8):
        torch.cuda.synchronize()
        started = time.perf_counter()
        engine.forward_backward(data, loss)
        engine.optimizer_step(1e-6)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    away, back = engine.place("host"), engine.place("device")
    again, _ = engine.place("host"), engine.place("device")
    return {
        "tokens_per_s": data.num_tokens / float(np.median(times[2:])),
        "peak_bytes": float(torch.cuda.max_memory_allocated()),
        "offload_bytes": float(away.bytes),
        "offload_s": min(away.seconds, again.seconds),
        "onload_s": back.seconds,
    }


def main() -> None:
    torch.cuda.set_device(0)
    store = os.path.join(tempfile.mkdtemp(), "store")
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=0, world_size=1)
    settings = TrainSettings(dtype="bfloat16", micro_batch_tokens=16384)
    results: dict[str, dict[str, float]] = {}
    for name in ("single", "fsdp", "single again", "fsdp again"):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(Qwen2Config(**SHAPE))
        torch.cuda.reset_peak_memory_stats()
        engine: Any = SingleDevice(model.cuda(), settings) if name.startswith("single") else Fsdp(model, settings)
        results[name] = measure(engine)
        print(name, json.dumps(results[name]), flush=True)
        del engine, model
        torch.cuda.empty_cache()
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w") as file:
            json.dump({"device": torch.cuda.get_device_name(), "rows": ROWS, "prompt": PROMPT, "answer": ANSWER, **results}, file, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
