"""Prefilled tokens and time of conversations, with and without reuse of the KV cache across turns.

    python benchmarks/prefix_reuse.py [--turns 10] [--conversations 8] [--model PATH]

Every conversation starts with an opening prompt; each turn adds a completion and a message of the
user. Without reuse, the kept contexts are dropped after every turn. Both run interleaved on one
engine; seconds are medians of the rounds. It uses a GPU if there is one; without `--model`, the
weights are random, of a small architecture on a CPU and of Qwen2.5-0.5B on a GPU.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_load import SHAPES, VOCABULARY  # noqa: E402
from benchmarks.report import command_line  # noqa: E402
from paceline.model.engine_weights import engine_weights  # noqa: E402
from paceline.model.loading import load_model  # noqa: E402
from paceline.rollout.native.engine import NativeEngine  # noqa: E402
from paceline.types import Request, Sampling  # noqa: E402

SMALL = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 4096,
}  # fmt: skip
QWEN_05B = SHAPES["0.5B"] | {"vocab_size": VOCABULARY}


def open_model(path: str | None, device: torch.device) -> PreTrainedModel:
    if path:
        return load_model(path, "bfloat16" if device.type == "cuda" else "float32").to(device)
    torch.manual_seed(0)
    shape = QWEN_05B if device.type == "cuda" else SMALL
    config = Qwen2Config(**shape, tie_word_embeddings=True, max_position_embeddings=32_768)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Qwen2ForCausalLM(config).eval().to(device, dtype)


def converse(
    engine: NativeEngine, options: argparse.Namespace, round_: int, reuse: bool
) -> tuple[float, int, int]:
    """Return the seconds of all turns, and the tokens prefilled in the first and in later turns."""
    random = np.random.default_rng(round_)

    def message(tokens: int) -> tuple[int, ...]:
        return tuple(random.integers(0, 4096, tokens).tolist())

    contexts = [message(options.opening) for _ in range(options.conversations)]
    start, first, before = time.perf_counter(), 0, engine.tokens_prefilled
    for turn in range(options.turns):
        engine.submit(
            [
                Request(f"{turn}-{n}", context, n, Sampling(options.completion))
                for n, context in enumerate(contexts)
            ]
        )
        while engine.has_work:
            for id, completion in engine.step():
                n = int(id.partition("-")[2])
                contexts[n] += (*completion.tokens.tolist(), *message(options.message))
        first = first or engine.tokens_prefilled - before
        if not reuse:
            engine.wait_idle()
    seconds = time.perf_counter() - start
    engine.wait_idle()
    return seconds, first, engine.tokens_prefilled - before - first


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", help="directory or Hugging Face model ID")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--conversations", type=int, default=8, help="at the same time")
    parser.add_argument("--opening", type=int, default=256, help="tokens of the first prompt")
    parser.add_argument("--message", type=int, default=32, help="tokens of each later message")
    parser.add_argument("--completion", type=int, default=32, help="tokens of each completion")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = open_model(options.model, device)
    longest = options.opening + options.turns * (options.message + options.completion)
    engine = NativeEngine(
        model.config,
        engine_weights(model, share=True, max_length=longest),
        slots=options.conversations,
        max_length=longest,
    )
    converse(engine, options, 0, reuse=True)  # warm-up
    results: dict[bool, list[tuple[float, int, int]]] = {True: [], False: []}
    for round_ in range(1, options.rounds + 1):
        for reuse, found in results.items():
            found.append(converse(engine, options, round_, reuse))
    episode = {
        reuse: statistics.median(seconds for seconds, _, _ in found) / options.conversations
        for reuse, found in results.items()
    }
    (_, first, later), (_, _, later_without) = results[True][0], results[False][0]
    print(
        f"{options.turns} turns, {options.conversations} conversations on {device}: the first turn "
        f"prefills {first:,} tokens; later turns {later:,} with reuse, {later_without:,} without "
        f"({later_without / max(1, later):.1f}x fewer); {episode[True]:.3f} s per episode with "
        f"reuse, {episode[False]:.3f} s without ({episode[False] / episode[True]:.2f}x faster)"
    )


if __name__ == "__main__":
    main()
