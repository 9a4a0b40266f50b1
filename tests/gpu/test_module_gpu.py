"""Models without a fast path on a GPU: the engine and the trainer say what transformers says."""

import copy

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from paceline.rollout.native.engine import NativeEngine
from paceline.train.settings import TrainSettings
from paceline.train.single import SingleDevice
from tests.architectures import tiny_architecture
from tests.unit.test_architectures import LONGEST, PROMPTS, Likelier, batch, generate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@torch.no_grad()
def plain(model: PreTrainedModel, tokens: list[int]) -> np.ndarray:
    ids = torch.tensor([tokens], device="cuda")
    return (
        torch.log_softmax(model(ids, use_cache=False).logits[0, :-1].float(), -1)
        .gather(1, ids[0, 1:, None])[:, 0]
        .cpu()
        .numpy()
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gpt2", "bloom", "gemma2", "gpt_oss", "mixtral", "deepseek_v3"])
def test_a_hybrid_engine_without_a_fast_path_agrees_with_transformers_and_learns(
    name: str, dtype: str
) -> None:
    model = tiny_architecture(name).cuda()
    reference = copy.deepcopy(model)
    trainer = SingleDevice(model, TrainSettings(dtype=dtype))
    engine = NativeEngine(
        model.config, trainer.shared_weights(LONGEST), slots=4, max_length=LONGEST
    )
    answers = generate(engine)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert (
            np.abs(
                answer.logprobs
                - plain(reference, [*prompt, *answer.tokens.tolist()])[len(prompt) - 1 :]
            ).max()
            < 1e-3
        )
    rows = batch(PROMPTS, answers)
    off = np.abs(
        trainer.logprobs(rows)[rows.mask] - np.concatenate([answer.logprobs for answer in answers])
    )
    assert off.mean() < (1e-3 if dtype == "float32" else 0.1)
    trainer.forward_backward(rows, Likelier())
    trainer.optimizer_step(0.05)
    engine.set_version(1)
    reference.load_state_dict(model.state_dict())
    for prompt, answer in zip(PROMPTS, generate(engine), strict=True):
        assert (
            np.abs(
                answer.logprobs
                - plain(reference, [*prompt, *answer.tokens.tolist()])[len(prompt) - 1 :]
            ).max()
            < 1e-3
        )
