"""The engine's weights, fused from those of a module: shared or copied, never stale."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CLIPConfig,
    DogeConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MiniMaxConfig,
    MistralConfig,
    MistralForCausalLM,
    PretrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
)

from paceline.errors import ModelError, SyncError
from paceline.model.engine_weights import ModuleWeights, engine_weights
from paceline.model.support import check_generates
from paceline.model.weights import DecoderWeights
from paceline.rollout.native.engine import NativeEngine
from paceline.types import Request, Sampling
from tests.architectures import tiny_architecture

pytestmark = pytest.mark.usefixtures("packing")
SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 60, "max_position_embeddings": 64,
}  # fmt: skip


def model(tied: bool = True, seed: int = 0) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=tied, initializer_range=0.3))


def greedy(engine: NativeEngine) -> list[int]:
    engine.submit([Request("r", (1, 2, 3), 0, Sampling(12, temperature=0.0))])
    done: list = []
    while engine.has_work:
        done += engine.step()
    return done[0][1].tokens.tolist()


def expected(module: Qwen2ForCausalLM) -> list[int]:
    out = module.generate(
        torch.tensor([[1, 2, 3]]),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, 3:].tolist()


def train(module: Qwen2ForCausalLM, **kind: bool) -> None:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05, **kind)
    for _ in range(3):
        tokens = torch.arange(20)[None]
        module(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", [{"foreach": True}, {"fused": True}, {"foreach": False}])
@pytest.mark.parametrize("tied", [True, False])
def test_shared_weights_follow_optimizer(tied: bool, kind: dict[str, bool]) -> None:
    module = model(tied)
    parameters = dict(module.named_parameters())
    engine = NativeEngine(
        module.config, DecoderWeights.from_module(module, share=True), slots=2, max_length=32
    )
    assert all(parameters[name] is parameter for name, parameter in module.named_parameters())
    before = greedy(engine)
    train(module, **kind)
    engine.set_version(1)
    after = greedy(engine)
    assert after == expected(module) and after != before


def test_running_sequence_continues_with_weights_that_changed_while_engine_was_idle() -> None:
    completions = []
    for plan in ("set_version", "no call"):
        module, other = model(), model(seed=1)
        weights = DecoderWeights.from_module(module, share=True)
        engine = NativeEngine(module.config, weights, slots=2, max_length=32)
        engine.submit([Request("r", (1, 2, 3), 0, Sampling(12))])
        for _ in range(5):
            engine.step()
        engine.wait_idle()
        module.load_state_dict(other.state_dict())
        if plan == "set_version":
            engine.set_version(0)
        done: list = []
        while engine.has_work:
            done += engine.step()
        completions.append(done[0][1])
    assert completions[0].tokens.tolist() == completions[1].tokens.tolist()
    assert completions[0].logprobs.tolist() == completions[1].logprobs.tolist()


def test_shared_module_trains_saves_and_loads_like_plain_module(tmp_path) -> None:
    shared, plain = model(), model()
    weights = DecoderWeights.from_module(shared, share=True)
    train(shared)
    train(plain)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(shared.state_dict()[name], tensor)
    state = {name: parameter.detach() for name, parameter in shared.named_parameters()}
    save_file(state, tmp_path / "weights.safetensors")
    fresh = model(seed=5)
    shared.load_state_dict(fresh.state_dict())
    engine = NativeEngine(shared.config, weights, slots=1, max_length=32)
    assert greedy(engine) == expected(fresh)
    shared.load_state_dict(load_file(tmp_path / "weights.safetensors"), strict=False)
    assert greedy(engine) == expected(plain)


def test_copied_weights_change_only_when_loaded() -> None:
    module, other = model(), model(seed=1)
    engine = NativeEngine(
        module.config, DecoderWeights.from_module(module, share=False), slots=2, max_length=32
    )
    before = greedy(engine)
    train(module)
    assert greedy(engine) == before
    engine.load(other.state_dict().items(), 7)  # contains lm_head.weight
    assert (engine.version, greedy(engine)) == (7, expected(other))
    engine.load(module.named_parameters(), 8)  # does not
    assert (engine.version, greedy(engine)) == (8, expected(module))


@pytest.mark.parametrize("tied", [True, False])
def test_load_changes_nothing_when_names_or_shapes_are_wrong(tied: bool) -> None:
    module, other = model(tied), model(tied, seed=1)
    weights = DecoderWeights.from_module(module, share=False)
    engine = NativeEngine(module.config, weights, slots=2, max_length=32, version=3)
    before = {name: tensor.clone() for name, tensor in weights.named.items()}
    good = dict(other.named_parameters())
    name = "model.layers.1.self_attn.k_proj.weight"
    without = {key: value for key, value in good.items() if key != name}
    wrong_shape = {**good, name: good[name][:-1]}
    for bad, message in (
        (without, name),
        ({**good, "model.extra": good[name]}, "model.extra"),
        (wrong_shape, r"\(15, 32\)"),
    ):
        with pytest.raises(SyncError, match=message):
            engine.load(bad.items(), 4)
    assert engine.version == 3
    assert all(torch.equal(weights.named[key], tensor) for key, tensor in before.items())


def test_engine_weights_uses_module_when_architecture_has_no_fast_path() -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50))
    with pytest.raises(ModelError, match=r"'gpt2'.*llama, mistral, qwen2, qwen3"):
        DecoderWeights.from_module(gpt2, share=False)
    assert isinstance(engine_weights(gpt2, share=False, max_length=16), ModuleWeights)
    assert isinstance(engine_weights(model(), share=False, max_length=16), DecoderWeights)


def test_dynamic_rope_is_supported_up_to_its_original_length() -> None:
    config = LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    )
    assert isinstance(
        engine_weights(LlamaForCausalLM(config), share=False, max_length=64), ModuleWeights
    )
    check_generates(config, 64)
    with pytest.raises(ModelError, match=r"longer than 64 tokens.*= 65 must not"):
        check_generates(config, 65)


def test_engine_weights_uses_module_when_length_exceeds_sliding_window() -> None:
    module = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=16))
    weights = engine_weights(module, share=False, max_length=16)
    assert isinstance(weights, DecoderWeights)
    NativeEngine(module.config, weights, slots=1, max_length=16)
    with pytest.raises(ModelError, match="16 tokens"):
        NativeEngine(module.config, weights, slots=1, max_length=17)
    assert isinstance(engine_weights(module, share=False, max_length=17), ModuleWeights)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MambaConfig(), "'mamba' keeps more"),
        (T5Config(), "'t5' is not a causal"),
        (MiniMaxConfig(), "linear_attention"),
        (CLIPConfig(), "'clip' is no"),
        (DogeConfig(keep_window_size=15), "attends to later tokens.*= 16 must not exceed"),
    ],
)
def test_check_generates_rejects_unsupported_architectures(
    config: PretrainedConfig, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        check_generates(config, 16)


def test_check_generates_accepts_hybrid_architecture_when_all_layers_are_attention() -> None:
    check_generates(tiny_architecture("granitemoehybrid").config, 16)
    mixed = tiny_architecture("granitemoehybrid", layer_types=["mamba", "attention"]).config
    with pytest.raises(ModelError, match="'granitemoehybrid' keeps more"):
        check_generates(mixed, 16)


def test_copied_weights_convert_dtype_when_loaded() -> None:
    module = model()
    weights = DecoderWeights.from_module(module, share=False, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    weights.load(dict(module.named_parameters()))
    assert {tensor.dtype for tensor in weights.named.values()} == {torch.bfloat16}
    assert all(
        torch.equal(weights.named[name], parameter.bfloat16())
        for name, parameter in module.named_parameters()
    )
