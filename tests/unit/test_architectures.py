"""Architectures that run through their module match transformers in generation and training."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from paceline.algo.loss import LossTerms, TokenData, TokenOutputs
from paceline.errors import ModelError
from paceline.model.attention import packed_attention
from paceline.model.engine_weights import ModuleWeights, engine_weights
from paceline.model.loading import load_model, model_body
from paceline.model.stored_weights import load_onto
from paceline.rollout.native.engine import NativeEngine
from paceline.training.lora import LoraDevice
from paceline.training.settings import LoraSettings, TrainSettings
from paceline.training.single import SingleDevice
from paceline.types import Batch, Completion, Finish, Request, Sampling
from tests.architectures import ARCHITECTURES, tiny_architecture

LONGEST = 32
PROMPTS = [(5, 9, 13, 3, 7), (8, 4), (11, 6, 12, 7, 9, 10, 3, 5, 6), (3,)]


def generate(engine: NativeEngine, temperature: float = 1.0, tokens: int = 12) -> list[Completion]:
    requests = [
        Request(str(n), prompt, n, Sampling(tokens, temperature=temperature))
        for n, prompt in enumerate(PROMPTS)
    ]
    engine.submit(
        [*requests, Request("again", PROMPTS[0], 9, Sampling(tokens, temperature=temperature))]
    )
    done = {}
    while engine.has_work:
        done.update(engine.step())
    return [done[str(n)] for n in range(len(PROMPTS))]


@torch.no_grad()
def plain_logprobs(model: PreTrainedModel, tokens: list[int]) -> np.ndarray:
    ids = torch.tensor([tokens])
    return (
        torch.log_softmax(model(ids, use_cache=False).logits[0, :-1].float(), -1)
        .gather(1, ids[0, 1:, None])[:, 0]
        .numpy()
    )


@torch.no_grad()
def check_greedy(model: PreTrainedModel, completions: list[Completion]) -> None:
    """Check that each token is the one that a plain forward pass finds most likely there."""
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        ids = torch.tensor([[*prompt, *completion.tokens.tolist()]])
        likeliest = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].argmax(-1)
        assert completion.tokens.tolist() == likeliest.tolist() and len(likeliest) == 12


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_engine_matches_transformers(name: str) -> None:
    model = tiny_architecture(name)
    weights = engine_weights(copy.deepcopy(model), share=True, max_length=LONGEST)
    assert isinstance(weights, ModuleWeights)
    engine = NativeEngine(model.config, weights, slots=4, max_length=LONGEST)
    for prompt, completion in zip(PROMPTS, generate(engine), strict=True):
        expected = plain_logprobs(model, [*prompt, *completion.tokens.tolist()])[len(prompt) - 1 :]
        assert np.abs(completion.logprobs - expected).max() < 1e-4
    check_greedy(model, generate(engine, temperature=0.0))


def batch(prompts: list[tuple[int, ...]], completions: list[Completion]) -> Batch:
    tokens = [
        [*prompt, *completion.tokens.tolist()]
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    lengths = np.array([len(row) for row in tokens], np.int32)
    mask = np.concatenate(
        [np.arange(len(row)) >= len(prompt) for prompt, row in zip(prompts, tokens, strict=True)]
    )
    flat = np.concatenate(tokens).astype(np.int32)
    zeros = np.zeros(len(flat), np.float32)
    return Batch(
        flat,
        lengths,
        mask,
        zeros,
        np.zeros_like(flat),
        np.zeros(len(tokens), np.float32),
        np.arange(len(tokens), dtype=np.int32),
    )


class Likelier:
    """A loss that makes the trained tokens more likely."""

    def weights(self, batch: Batch) -> np.ndarray:
        return batch.mask.astype(np.float32)

    def __call__(self, outputs: TokenOutputs, data: TokenData) -> LossTerms:
        return LossTerms(-(outputs.logprobs * data.weights).sum(), {}, {})


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_trainer_matches_transformers_and_updates_shared_engine(name: str, tmp_path: Path) -> None:
    plain, model = tiny_architecture(name), tiny_architecture(name)
    trainer = SingleDevice(
        model, TrainSettings(gradient_checkpointing=model.supports_gradient_checkpointing)
    )
    engine = NativeEngine(
        model.config, trainer.shared_weights(LONGEST), slots=4, max_length=LONGEST
    )
    made = generate(engine)
    rows = batch([*PROMPTS, PROMPTS[0]], [*made, made[1]])

    def compare(reference: PreTrainedModel) -> None:
        found = trainer.logprobs(rows)
        for start, stop in zip(rows.offsets[:-1], rows.offsets[1:], strict=True):
            expected = np.concatenate(
                ([0.0], plain_logprobs(reference, rows.tokens[start:stop].tolist()))
            )
            assert (
                np.abs(found[start:stop] - np.where(rows.mask[start:stop], expected, 0)).max()
                < 1e-4
            )

    compare(plain)
    plain.get_input_embeddings().padding_idx = None  # it is trained like any other token
    gradient = plain_gradients(plain, rows)
    trainer.forward_backward(rows, Likelier())
    for n, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradient[n], atol=1e-3, rtol=1e-3)
    before = generate(engine, temperature=0.0)
    trainer.optimizer_step(0.05)
    engine.set_version(1)
    after = generate(engine, temperature=0.0)
    assert [c.tokens.tolist() for c in after] != [c.tokens.tolist() for c in before]
    plain.load_state_dict(model.state_dict())
    compare(plain)
    check_greedy(plain, after)
    trainer.save(tmp_path)
    compare(
        AutoModelForCausalLM.from_pretrained(
            tmp_path / "actor", attn_implementation="eager", dtype=torch.float32
        )
    )


def test_trainer_keeps_parameters_frozen_that_the_model_freezes(tmp_path: Path) -> None:
    tiny_architecture("ernie4_5_moe").save_pretrained(tmp_path / "model")
    for model in (
        load_onto(str(tmp_path / "model"), torch.device("cpu")),
        load_model(str(tmp_path / "model")),
    ):
        before = copy.deepcopy(model.state_dict())
        trainer = SingleDevice(model, TrainSettings())
        tokens = np.random.default_rng(0).integers(3, 64, (4, 12)).astype(np.int32)
        made = [Completion(row, np.zeros(12), np.zeros(12), Finish.LENGTH) for row in tokens]
        trainer.forward_backward(batch(PROMPTS, made), Likelier())
        trainer.optimizer_step(0.05)
        trainer.save(tmp_path)
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "actor").state_dict()
        assert saved.keys() == before.keys()
        for name, tensor in before.items():
            assert torch.equal(saved[name], tensor) == name.endswith("e_score_correction_bias")


@pytest.mark.parametrize(
    ("name", "more"),
    [("mistral", {}), ("phimoe", {}), ("qwen2_moe", {"use_sliding_window": True})],
)
def test_trainer_keeps_window_that_is_longer_than_rows_of_its_first_check(
    name: str, more: dict[str, bool]
) -> None:
    model = tiny_architecture(name, sliding_window=9, **more)
    tokens = np.random.default_rng(0).integers(3, 64, (3, 20))
    made = [
        Completion(row.astype(np.int32), np.zeros(20), np.zeros(20), Finish.LENGTH)
        for row in tokens
    ]
    rows = batch(PROMPTS[:3], made)
    found = SingleDevice(copy.deepcopy(model), TrainSettings()).logprobs(rows)
    for start, stop in zip(rows.offsets[:-1], rows.offsets[1:], strict=True):
        expected = plain_logprobs(model, rows.tokens[start:stop].tolist())
        trained = rows.mask[start + 1 : stop]
        assert np.abs(found[start + 1 : stop] - expected)[trained].max() < 1e-4


def test_packed_attention_rejects_sparse_attention() -> None:
    states, indices = torch.zeros(1, 2, 3, 4), torch.zeros(1, 3, 2, dtype=torch.int32)
    with pytest.raises(ModelError, match="sparse attention"):
        packed_attention(torch.nn.Identity(), states, states, states, None, indices=indices)


def plain_gradients(model: PreTrainedModel, rows: Batch) -> dict[str, torch.Tensor | None]:
    """Return the gradients of the same loss, computed with transformers alone."""
    for start, stop in zip(rows.offsets[:-1], rows.offsets[1:], strict=True):
        ids = torch.from_numpy(rows.tokens[start:stop].astype(np.int64))[None]
        logprobs = torch.log_softmax(model(ids, use_cache=False).logits[0, :-1], -1).gather(
            1, ids[0, 1:, None]
        )[:, 0]
        (-(logprobs * torch.from_numpy(rows.mask[start + 1 : stop]))).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


# Transposed weights, custom linear layers, two kinds of experts, and two routers that are linear.
@pytest.mark.parametrize(
    "name", ["gpt2", "falcon", "mixtral", "deepseek_v3", "phimoe", "llama4_text"]
)
def test_engine_gets_trained_adapters_as_merged_weights(name: str) -> None:
    model = tiny_architecture(name)
    engine = NativeEngine(
        model.config, ModuleWeights(model, share=False), slots=4, max_length=LONGEST
    )
    trainer = LoraDevice(model, TrainSettings(lora=LoraSettings(rank=2)))
    before = generate(engine)
    rows = batch(PROMPTS, before)
    for _ in range(2):
        trainer.forward_backward(rows, Likelier())
        trainer.optimizer_step(0.1)
    engine.load(trainer.current_weights(), 1)
    after = generate(engine)
    assert [c.tokens.tolist() for c in after] != [c.tokens.tolist() for c in before]
    found = trainer.logprobs(rows := batch(PROMPTS, after))[rows.mask]
    assert np.abs(found - np.concatenate([c.logprobs for c in after])).max() < 1e-4


@pytest.mark.parametrize("name", ["gpt2", "opt", "bloom", "gemma2", "llama4_text"])
def test_critic_values_match_models_hidden_states(name: str) -> None:
    model = tiny_architecture(name)
    weights = ModuleWeights(model, share=False)
    engine = NativeEngine(model.config, weights, slots=4, max_length=LONGEST)
    rows = batch(PROMPTS, generate(engine))
    critic = SingleDevice(model_body(model), TrainSettings(), head="value")
    linear = critic._packed.head.linear
    torch.nn.init.normal_(linear.weight)
    found = critic.values(rows)
    for start, stop in zip(rows.offsets[:-1], rows.offsets[1:], strict=True):
        ids = torch.from_numpy(rows.tokens[start:stop].astype(np.int64))[None]
        with torch.no_grad():
            expected = linear(
                model_body(model)(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
            )[:, 0].numpy()
        np.testing.assert_allclose(
            found[start + 1 : stop], np.where(rows.mask[start + 1 : stop], expected, 0), atol=1e-4
        )
