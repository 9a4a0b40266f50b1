"""FP8 in the native engine on a CPU: the numbers are those of the GPU's kernels."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from paceline.config import check_trainable, load_config
from paceline.errors import ConfigError, ModelError, SyncError
from paceline.model.engine_weights import ModuleWeights
from paceline.model.fp8 import FP8, dequantized, quantize, rounded
from paceline.model.fp8_weights import fp8_weights
from paceline.model.known_shapes import known_shape
from paceline.model.weights import DecoderWeights
from paceline.rollout.native.engine import NativeEngine
from paceline.rollout.vllm_settings import check_kv_cache
from paceline.types import Completion, Request
from paceline.workers.cluster import Node, parse_nodes
from paceline.workers.fit import memory_of
from paceline.workers.phase_memory import Models, Phase
from paceline.workers.pools import plan_workers
from tests.unit.test_automatic import GSM8K, LAPTOP, chosen
from tests.unit.test_native_engine import build, check_logprobs, engine_of, requests, run

FP8_WEIGHTS = "rollout.weight_dtype=fp8"


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


def fp8_engine(module: PreTrainedModel) -> NativeEngine:
    weights = fp8_weights(DecoderWeights.from_module(module, share=False))
    return NativeEngine(module.config, weights, slots=8, max_length=128)


@torch.no_grad()
def round_weights(module: PreTrainedModel) -> PreTrainedModel:
    """Replace the linear layers' weights by what FP8 makes of them."""
    for name, weight in module.named_parameters():
        if name.endswith("_proj.weight"):
            target, scale = torch.empty_like(weight, dtype=FP8), torch.empty(len(weight))
            quantize(weight, target, scale)
            weight.copy_(dequantized(target, scale, weight.dtype))
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_weights_are_within_half_of_step(dtype: torch.dtype) -> None:
    weight = (torch.randn(50, 64) * torch.logspace(-6, 3, 50)[:, None]).to(dtype)
    weight[7] = 0
    target, scale = torch.empty(50, 64, dtype=FP8), torch.empty(50)
    quantize(weight, target, scale)
    error = (dequantized(target, scale, torch.float32) - weight.float()).abs()
    # Three bits of mantissa; the smallest numbers have a fixed step.
    assert (error <= weight.float().abs() / 16 + scale[:, None] * 2**-10).all()
    assert (scale.log2() % 1 == 0).all(), "powers of two"


def test_quantized_weights_are_exact_in_bfloat16() -> None:
    target, scale = torch.empty(50, 64, dtype=FP8), torch.empty(50)
    quantize(torch.randn(50, 64), target, scale)
    exact = dequantized(target, scale, torch.float32)
    assert torch.equal(dequantized(target, scale, torch.bfloat16).float(), exact)


@pytest.mark.parametrize("name", ["qwen2 tied", "qwen2 untied", "qwen3", "llama3 rope, biases"])
def test_fp8_weights_give_logprobs_of_rounded_weights(name: str) -> None:
    module, wanted = build(name), requests(12)
    done = run(fp8_engine(module), wanted)
    for request in wanted:
        check_logprobs(round_weights(module), request, done[request.id])


@pytest.mark.parametrize("streamed", [False, True])
def test_fp8_engine_quantizes_new_weights(streamed: bool) -> None:
    old, new = build(seed=0), build(seed=1)
    engine = fp8_engine(old)
    tensors = dict(new.named_parameters())
    engine.load(iter(tensors.items()) if streamed else tensors, 1)
    expected, done = run(fp8_engine(new), requests(8)), run(engine, requests(8))
    for id, completion in expected.items():
        assert done[id].tokens.tolist() == completion.tokens.tolist()
        assert done[id].logprobs.tobytes() == completion.logprobs.tobytes()


def test_fp8_engine_keeps_weights_when_new_ones_are_incomplete() -> None:
    module = build()
    engine = fp8_engine(module)
    tensors = {name: tensor * 2 for name, tensor in module.named_parameters()}
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    with pytest.raises(SyncError, match="up_proj"):
        engine.load(tensors, 1)
    expected, done = run(fp8_engine(module), requests(4)), run(engine, requests(4))
    assert all(done[id].tokens.tolist() == expected[id].tokens.tolist() for id in expected)


def test_fp8_weights_are_rejected_when_engine_calls_module() -> None:
    with pytest.raises(ModelError, match="weight_dtype"):
        fp8_weights(ModuleWeights(build(), False))


def test_vllm_rejects_fp8_weights() -> None:
    with pytest.raises(ConfigError, match="cannot load new weights into a quantized model"):
        load_config(None, ["rollout.engine=vllm", FP8_WEIGHTS])


def test_engine_has_copy_when_weights_are_fp8() -> None:
    assert load_config().shares_weights
    assert not load_config(None, [FP8_WEIGHTS]).shares_weights


@pytest.mark.parametrize("setting", ["rollout.kv_cache_dtype=fp8", FP8_WEIGHTS])
def test_fp8_turns_correction_on(setting: str) -> None:
    algorithm = load_config(None, [setting, "algorithm.name=dapo"]).algorithm
    assert (algorithm.correction, algorithm.proximal) == ("truncate", "recomputed")
    assert load_config(None, ["algorithm.name=dapo"]).algorithm.correction == "none"


@pytest.mark.parametrize(
    ("chosen_by_user", "correction"),
    [("correction=icepop", "icepop"), ("correction=none", "none"), ("proximal=behavior", "none")],
)
def test_fp8_keeps_correction_that_is_set(chosen_by_user: str, correction: str) -> None:
    config = load_config(None, [FP8_WEIGHTS, f"algorithm.{chosen_by_user}"])
    assert config.algorithm.correction == correction


def test_training_warns_when_fp8_is_not_corrected(caplog: pytest.LogCaptureFixture) -> None:
    check_trainable(load_config(None, [FP8_WEIGHTS]))
    assert not caplog.records
    check_trainable(load_config(None, [FP8_WEIGHTS, "algorithm.correction=none"]))
    assert "algorithm.correction = 'none'" in caplog.text


def test_mismatch_limit_fits_fp8() -> None:
    assert load_config(None, ["train.dtype=float32"]).mismatch_limit == 0.02
    assert load_config(None, ["train.dtype=float32", FP8_WEIGHTS]).mismatch_limit == 0.5
    assert load_config(None, [FP8_WEIGHTS, "sync.mismatch_limit=0.1"]).mismatch_limit == 0.1
