"""FP8 in the native engine on a CPU: the numbers are those of the GPU's kernels."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from paceline.config import load_config
from paceline.errors import ConfigError, ModelError
from paceline.model.engine_weights import ModuleWeights
from paceline.model.fp8 import FP8, rounded
from paceline.model.known_shapes import known_shape
from paceline.rollout.native.engine import NativeEngine
from paceline.rollout.vllm_settings import check_kv_cache
from paceline.types import Completion, Request
from paceline.workers.cluster import Node, parse_nodes
from paceline.workers.fit import memory_of
from paceline.workers.phase_memory import Models, Phase
from paceline.workers.pools import plan_workers
from tests.unit.test_automatic import GSM8K, LAPTOP, chosen
from tests.unit.test_native_engine import build, engine_of, requests, run


class RoundedCache(DynamicCache):
    """A KV cache of transformers with the numbers of an FP8 cache."""

    def update(self, keys, values, *place, **options):
        return super().update(rounded(keys, FP8), rounded(values, FP8), *place, **options)


@torch.no_grad()
def difference(
    module: PreTrainedModel, request: Request, completion: Completion, cache: DynamicCache
) -> np.ndarray:
    """Return how far the log-probs are from those of transformers with this cache."""
    tokens = torch.tensor([[*request.prompt, *completion.tokens.tolist()]])
    logits = module(tokens, past_key_values=cache).logits[0, len(request.prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, tokens[0, len(request.prompt) :, None])[:, 0]
    return np.abs(completion.logprobs - expected.numpy())


@pytest.mark.parametrize("name", ["qwen2 tied", "qwen3", "llama3 rope, biases"])
def test_fp8_cache_gives_logprobs_of_rounded_keys_and_values(name: str) -> None:
    module, wanted = build(name), requests(20, new=30)
    done = run(engine_of(module, kv_dtype=FP8), wanted)
    errors = [difference(module, r, done[r.id], RoundedCache()) for r in wanted]
    plain = [difference(module, r, done[r.id], DynamicCache()) for r in wanted]
    # A number between two of FP8 may be rounded the other way; the effect is that of one key.
    assert np.median(np.concatenate(errors)) < 1e-5
    assert np.mean(np.concatenate(errors)) < 0.1 * np.mean(np.concatenate(plain))


def test_fp8_cache_saturates_when_values_exceed_its_range() -> None:
    values = torch.tensor([1e6, -1e6, 448.0, 0.3])
    assert rounded(values, FP8).tolist() == [448.0, -448.0, 448.0, 0.3125]


def test_fp8_cache_is_rejected_when_engine_calls_module() -> None:
    module = build()
    with pytest.raises(ModelError, match="kv_cache_dtype"):
        NativeEngine(
            module.config, ModuleWeights(module, False), slots=2, max_length=64, kv_dtype=FP8
        )


def test_plan_has_more_slots_when_cache_is_fp8() -> None:
    plain = chosen("0.5b", "1:16GB", *GSM8K)[0].rollout.slots
    fp8 = chosen("0.5b", "1:16GB", *GSM8K, "rollout.kv_cache_dtype=fp8")[0].rollout.slots
    assert plain < fp8 == 256, "all completions of a step"


@pytest.mark.parametrize(("devices", "part"), [("1:80GB", 0.5), (LAPTOP, 1.0)])
def test_plan_halves_cache_only_on_gpu(devices: Sequence[Node] | str, part: float) -> None:
    nodes = parse_nodes(devices) if isinstance(devices, str) else devices

    def sequence(*settings: str) -> int:
        config = load_config(None, [*GSM8K, "train.dtype=bfloat16", *settings])
        models, plan = Models(known_shape("0.5b")), plan_workers(config, nodes)[0]
        phases = memory_of(plan, nodes, config, models).phases()
        return phases[Phase.GENERATE]["KV cache"].fixed

    assert sequence("rollout.kv_cache_dtype=fp8") == part * sequence()


def test_vllm_rejects_fp8_cache_without_gpu() -> None:
    check_kv_cache("fp8", gpu=True)
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        check_kv_cache("fp8", gpu=False)
