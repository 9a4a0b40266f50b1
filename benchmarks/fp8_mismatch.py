"""Difference of log-probs between a native engine with FP8 and a trainer, for the same weights.

    python benchmarks/fp8_mismatch.py MODEL [--tokens 64] [--dtype bfloat16] [--out FILE]
    python benchmarks/fp8_mismatch.py MODEL --scales    # of the KV cache: 1, or per token and head

MODEL: a directory, GGUF file or Hugging Face model ID. The engine samples completions of 16 prompts
at temperature 1. A forward pass in float32 over the same tokens replaces the trainer. The ratio is
trainer / engine, which algorithm.correction bounds.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_load import FP8_VARIANTS  # noqa: E402
from benchmarks.report import command_line  # noqa: E402
from paceline.algo.correction import OUTLIER_DIFF  # noqa: E402
from paceline.model.fp8 import FP8, LARGEST, rounded  # noqa: E402
from paceline.model.fp8_weights import fp8_weights  # noqa: E402
from paceline.model.loading import default_device, load_model, load_tokenizer  # noqa: E402
from paceline.model.source import model_source  # noqa: E402
from paceline.model.weights import DecoderWeights  # noqa: E402
from paceline.rollout.native.engine import NativeEngine  # noqa: E402
from paceline.types import Completion, Request, Sampling  # noqa: E402

QUESTIONS = (
    "What is 17 times 23? Think step by step.",
    "Write a short story about a lighthouse.",
    "Explain why the sky is blue.",
    "Sort these numbers: 9, 2, 7, 5, 1.",
)


def sample(
    model: PreTrainedModel, requests: list[Request], dtype: torch.dtype, kv: bool, quantized: bool
) -> dict[str, Completion]:
    weights = DecoderWeights.from_module(model, share=False, dtype=dtype)
    engine = NativeEngine(
        model.config,
        fp8_weights(weights) if quantized else weights,
        slots=len(requests),
        max_length=max(len(r.prompt) for r in requests) + requests[0].sampling.max_new_tokens,
        kv_dtype=FP8 if kv else None,
    )
    engine.submit(requests)
    done: dict[str, Completion] = {}
    while engine.has_work:
        done |= dict(engine.step())
    return done


@torch.inference_mode()
def logprobs(
    model: PreTrainedModel,
    request: Request,
    completion: Completion,
    cache: DynamicCache | None = None,
) -> Tensor:
    ids = torch.tensor([[*request.prompt, *completion.tokens.tolist()]], device=model.device)
    logits = model(ids, past_key_values=cache).logits[0, len(request.prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, ids[0, len(request.prompt) :, None])[:, 0].cpu()


class RoundedCache(DynamicCache):
    """A KV cache of transformers with the numbers of FP8, scaled by powers of two or not."""

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self._scaled = scaled

    def update(self, keys: Tensor, values: Tensor, *place: Any, **options: Any) -> Any:
        return super().update(self._round(keys), self._round(values), *place, **options)

    def _round(self, numbers: Tensor) -> Tensor:
        if not self._scaled:
            return rounded(numbers, FP8)
        scale = (LARGEST / numbers.abs().amax(-1, keepdim=True)).log2().floor().exp2()
        return rounded(numbers * scale, FP8) / scale


def compare_scales(model: PreTrainedModel, requests: list[Request]) -> None:
    done = sample(model, requests, torch.float32, False, False)
    for name, scaled in (("scale 1", False), ("a scale per token and head", True)):
        logs = torch.cat(
            [
                logprobs(model, r, done[r.id], RoundedCache(scaled))
                - logprobs(model, r, done[r.id])
                for r in requests
            ]
        )
        print(f"{name}: mean difference {logs.abs().mean():.4f}", flush=True)


def measure(
    model: PreTrainedModel, requests: list[Request], dtype: torch.dtype, kv: bool, quantized: bool
) -> dict[str, Any]:
    done = sample(model, requests, dtype, kv, quantized)
    logs = torch.cat(
        [logprobs(model, r, done[r.id]) - torch.from_numpy(done[r.id].logprobs) for r in requests]
    )
    return {
        "tokens": len(logs),
        "logprob_diff_mean": round(float(logs.abs().mean()), 5),
        "logprob_diff_max": round(float(logs.abs().max()), 3),
        "outlier_fraction": round(float((logs.abs() > OUTLIER_DIFF).float().mean()), 4),
        "kl_engine_trainer": round(float((logs.exp() - 1 - logs).mean()), 5),
        "ratio_above_2": round(float((logs.exp() > 2).float().mean()), 5),
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--scales", action="store_true", help="only compare scales")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    path = model_source(options.model)
    model, tokenizer = load_model(path).to(default_device()).eval(), load_tokenizer(path)
    dtype = getattr(torch, options.dtype)
    requests = [
        Request(
            f"{number}-{seed}", tuple(tokenizer.encode(text)), 10 * number + seed,
            Sampling(options.tokens),
        )
        for number, text in enumerate(QUESTIONS)
        for seed in range(4)
    ]  # fmt: skip
    if options.scales:
        compare_scales(model, requests)
        return
    results = {}
    for name, (kv, quantized) in FP8_VARIANTS.items():
        results[name] = measure(model, requests, dtype, kv, quantized)
        print(f"{options.dtype}, FP8 {name}: {results[name]}", flush=True)
    if options.out:
        options.out.write_text(json.dumps({options.dtype: results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
