"""Single-device engine: shared parameters, packed attention, models it cannot train."""

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    XLMConfig,
    XLMWithLMHeadModel,
)
from transformers.models.qwen2 import modeling_qwen2

from paceline.algo.loss import LossTerms, PolicyLoss, TokenData, TokenOutputs
from paceline.errors import ModelError, OutOfMemory
from paceline.model import attention
from paceline.training import head
from paceline.training.colocated import ColocatedEngine
from paceline.training.settings import TrainSettings
from paceline.training.single import SingleDevice
from tests.contract.test_train_engine import (
    ALGORITHM,
    LOSS,
    TEMPERATURE,
    gradients,
    plain_logprobs,
    random_batch,
    same_bits,
    tiny,
    weights_of,
)
from tests.unit.test_train_head import LargestTensor

SETTINGS = TrainSettings()


def fuse_qkv(model: PreTrainedModel) -> list[torch.Tensor]:
    """Make q, k and v views of one tensor, as a rollout engine does that shares the weights."""
    storages = []
    for layer in model.base_model.layers:
        parts = [
            layer.self_attn.q_proj.weight,
            layer.self_attn.k_proj.weight,
            layer.self_attn.v_proj.weight,
        ]
        storages.append(torch.cat([p.data for p in parts]))
        start = 0
        for part in parts:
            part.data = storages[-1][start : start + len(part)]
            start += len(part)
    return storages


def test_padding_token_is_trained_like_any_other_token() -> None:
    engines = [SingleDevice(tiny("qwen2"), SETTINGS)]
    model, batch = tiny("qwen2"), random_batch()
    model.get_input_embeddings().padding_idx = int(batch.tokens[0])
    engines.append(SingleDevice(model, SETTINGS))
    for engine in engines:
        engine.forward_backward(batch, LOSS)
        engine.optimizer_step(1e-2)
    plain, padded = map(weights_of, engines)
    assert same_bits(plain, padded)


@pytest.mark.parametrize("fused_first", [True, False])
def test_training_updates_fused_views_in_place(fused_first: bool, tmp_path) -> None:  # type: ignore[no-untyped-def]
    model, plain = tiny("qwen2"), SingleDevice(tiny("qwen2"), SETTINGS)
    identities = {name: id(p) for name, p in model.named_parameters()}
    if fused_first:
        storages = fuse_qkv(model)
    engine = SingleDevice(model, SETTINGS)
    if not fused_first:
        storages = fuse_qkv(model)
    for each in (engine, plain):
        each.forward_backward(random_batch(), LOSS)
        each.optimizer_step(1e-2)
    assert {name: id(p) for name, p in engine.model.named_parameters()} == identities
    for name, weight in weights_of(plain).items():
        assert torch.equal(dict(engine.export_weights())[name], weight)
    for layer, storage in zip(model.base_model.layers, storages, strict=True):
        assert (
            torch.equal(storage[:32], layer.self_attn.q_proj.weight)
            and storage.data_ptr() == layer.self_attn.q_proj.weight.data_ptr()
        )
    engine.save(tmp_path)
    before = storages[0].clone()
    storages[0].zero_()
    engine.load(tmp_path)
    assert torch.equal(storages[0], before)


def test_module_still_works_as_transformers_model() -> None:
    model, ids = tiny("qwen2"), torch.arange(12).view(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits
        engine = SingleDevice(model, SETTINGS)
        assert torch.allclose(
            engine.model(input_ids=ids, attention_mask=mask).logits, expected, atol=1e-6
        )


def test_logprobs_are_thread_safe() -> None:
    engine = SingleDevice(tiny("qwen2"), SETTINGS)
    batches = [random_batch(seed=seed) for seed in range(4)]
    expected = [engine.logprobs(batch) for batch in batches]
    with ThreadPoolExecutor(2) as pool:
        for found, right in zip(pool.map(engine.logprobs, batches * 3), expected * 3, strict=True):
            assert (found == right).all()


def test_sdpa_gives_same_gradient_for_long_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, results = random_batch(), []
    for longest in (attention.SHORT_ROW, 1):
        monkeypatch.setattr(attention, "SHORT_ROW", longest)
        model = tiny("qwen3")
        SingleDevice(model, SETTINGS).forward_backward(batch, LOSS)
        results.append(gradients(model))
    for name in results[0]:
        assert (results[0][name] - results[1][name]).abs().max() < 1e-6


def test_logprobs_respect_sliding_window() -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=37, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, use_sliding_window=True, sliding_window=4,
        layer_types=["sliding_attention", "full_attention"], attn_implementation="eager",
    )  # fmt: skip
    model, batch = Qwen2ForCausalLM(config), random_batch()
    with torch.no_grad():
        expected, _ = plain_logprobs(model, batch)
    found = SingleDevice(model, SETTINGS, temperature=TEMPERATURE).logprobs(batch)
    assert np.abs(found[batch.mask] - expected.numpy()).max() < 1e-5


def test_engine_never_holds_logits_of_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(head.CHUNK_LOGITS, "cpu", 8 * 37)
    monkeypatch.setattr(head, "CHUNK_ROWS", 8)
    engine, batch = SingleDevice(tiny("qwen2"), SETTINGS), random_batch(rows=60)
    vocabulary_wide = []

    class Spy(LargestTensor):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if isinstance(result, torch.Tensor) and result.ndim == 2 and result.shape[1] == 37:
                vocabulary_wide.append(result.shape[0])
            return result

    with Spy():
        engine.forward_backward(batch, LOSS)
    # [32, 37] is the transposed output layer.
    assert max(n for n in vocabulary_wide if n != 32) <= 8
    assert batch.mask.sum() > 100


def test_gradient_checkpointing_recomputes_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    plain = modeling_qwen2.Qwen2MLP.forward
    monkeypatch.setattr(
        modeling_qwen2.Qwen2MLP, "forward", lambda self, x: (calls.append(1), plain(self, x))[1]
    )
    for checkpointing, expected in ((False, 2), (True, 4)):
        engine = SingleDevice(tiny("qwen2"), TrainSettings(gradient_checkpointing=checkpointing))
        calls.clear()
        engine.forward_backward(random_batch(), LOSS)
        assert len(calls) == expected


def test_engine_removes_dropout_with_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("llama")
    for layer in model.base_model.layers:
        layer.self_attn.attention_dropout = 0.5
    batch = random_batch()
    with caplog.at_level(logging.WARNING):
        engine = SingleDevice(model, TrainSettings(gradient_checkpointing=True))
    assert "dropout" in caplog.text
    metrics = SingleDevice(tiny("llama"), SETTINGS).forward_backward(batch, LOSS)
    assert engine.forward_backward(batch, LOSS) == pytest.approx(metrics, abs=1e-6)


def test_bfloat16_keeps_float32_parameters() -> None:
    batch = random_batch()
    exact = SingleDevice(tiny("qwen2"), SETTINGS).logprobs(batch)
    model = tiny("qwen2")
    engine = SingleDevice(model, TrainSettings(dtype="bfloat16"))
    assert np.abs(engine.logprobs(batch) - exact).max() < 0.1
    engine.forward_backward(batch, LOSS)
    assert engine.optimizer_step(1e-3) > 0
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_engine_accepts_bfloat16_rounding_of_confident_model() -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(100)
    batch = random_batch()
    difference = np.abs(
        SingleDevice(model, TrainSettings(dtype="bfloat16"), 0.2).logprobs(batch)
        - SingleDevice(model, TrainSettings(), 0.2).logprobs(batch)
    )
    assert difference.max() > 0.3, "the model must be confident enough for large rounding errors"


def test_engine_rejects_model_with_unknown_logit_transform() -> None:
    class Squared(Qwen2ForCausalLM):
        def forward(self, **inputs: Any) -> Any:
            outputs = super().forward(**inputs)
            outputs.logits = outputs.logits.square()
            return outputs

    with pytest.raises(ModelError, match="Squared cannot be trained: its log-probs differ"):
        SingleDevice(Squared(tiny("qwen2").config), SETTINGS)


def test_engine_rejects_model_that_sees_later_tokens() -> None:
    config = XLMConfig(vocab_size=80, emb_dim=32, n_layers=1, n_heads=2, init_std=0.2)
    with pytest.raises(ModelError, match="XLMWithLMHeadModel cannot be trained"):
        SingleDevice(XLMWithLMHeadModel(config), SETTINGS)


def test_engine_rejects_outputs_of_other_head() -> None:
    with pytest.raises(ModelError, match="critic"):
        SingleDevice(tiny("qwen2"), SETTINGS).values(random_batch())
    with pytest.raises(ModelError, match="actor"):
        SingleDevice(tiny("qwen2").base_model, SETTINGS, head="value").logprobs(random_batch())


def test_out_of_memory_error_lists_memory_holders_and_settings() -> None:
    class Full(PolicyLoss):
        def __call__(self, outputs: TokenOutputs, data: TokenData) -> LossTerms:
            raise torch.OutOfMemoryError(
                "Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139 GiB"
            )

    engine = SingleDevice(tiny("qwen2"), TrainSettings(micro_batch_tokens=512))
    released: list[bool] = []
    engine.colocated.append(
        ColocatedEngine("KV cache", lambda: 2**31, lambda: released.append(True))
    )
    holders = r"20.00 GiB.*parameters 0.00 GiB.*KV cache 2.00 GiB"
    settings = "now 512.*gradient_checkpointing"
    with pytest.raises(OutOfMemory, match=f"{holders}.*{settings}"):
        engine.forward_backward(random_batch(), Full(ALGORITHM))
    assert released == [True]
