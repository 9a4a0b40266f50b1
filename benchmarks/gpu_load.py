"""The load of GPU benchmarks: models in shapes of Qwen2.5, prompts, and the limits of the GPU."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from paceline.rollout.native.engine import NativeEngine
from paceline.types import Completion, Request, Sampling

PROMPT = 128  # tokens
VOCABULARY = 151936
# FP8 of the KV cache and of the weights
FP8_VARIANTS = {
    "auto": (False, False),
    "kv": (True, False),
    "weights": (False, True),
    "kv and weights": (True, True),
}
SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "1.5B": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
}


def make_model(shape: str, dtype: torch.dtype = torch.bfloat16) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with torch.device("cuda"):
        config = Qwen2Config(
            **SHAPES[shape],
            vocab_size=VOCABULARY,
            tie_word_embeddings=True,
            max_position_embeddings=32768,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        model = Qwen2ForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def make_requests(lengths: list[int], round: int, **sampling: Any) -> list[Request]:
    prompts = np.random.default_rng(round).integers(0, VOCABULARY, (len(lengths), PROMPT)).tolist()
    return [
        Request(f"{round}-{i}", tuple(p), i, Sampling(n, **sampling))
        for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))
    ]


def generate(engine: NativeEngine, requests: list[Request]) -> tuple[dict[str, Completion], float]:
    torch.cuda.synchronize()
    start = time.perf_counter()
    engine.submit(requests)
    done: dict[str, Completion] = {}
    while engine.has_work:
        done |= dict(engine.step())
    return done, time.perf_counter() - start


def bandwidth() -> float:
    """Return bytes per second of a large copy; reads and writes both count."""
    a = torch.empty(2**32, dtype=torch.uint8, device="cuda").random_()
    b = torch.empty_like(a)
    return 2 * a.numel() / timed(lambda: b.copy_(a))


def matmul_rate() -> float:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / timed(lambda: a @ b)


def timed(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(8):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[2:])


def limit(shape: str, n: int, context: float, bytes_per_s: float, flops_per_s: float) -> float:
    """Return the highest possible tokens per second.

    Every step reads all weights and the live KV cache once and runs its matmuls at full rate.
    """
    s = SHAPES[shape]
    dim = s["hidden_size"] // s["num_attention_heads"]
    kv_width = s["num_key_value_heads"] * dim
    layer = s["hidden_size"] * (2 * s["hidden_size"] + 2 * kv_width + 3 * s["intermediate_size"])
    weights = s["num_hidden_layers"] * layer + s["hidden_size"] * VOCABULARY
    moved = 2 * weights + n * context * s["num_hidden_layers"] * 2 * kv_width * 2
    return n / max(moved / bytes_per_s, 2 * weights * n / flops_per_s)
