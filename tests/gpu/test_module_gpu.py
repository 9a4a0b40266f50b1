"""Models without a fast path on a GPU: engine and trainer agree with transformers."""

import copy

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from paceline.rollout.native.engine import NativeEngine
from paceline.training.settings import TrainSettings
from paceline.training.single import SingleDevice
from paceline.types import Completion
from tests.architectures import tiny_architecture
from tests.unit.test_architectures import LONGEST, PROMPTS, Likelier, batch, generate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@torch.no_grad()
def plain(model: PreTrainedModel, tokens: list[int]) -> np.ndarray:
    ids = torch.tensor([tokens], device="cuda")
    logprobs = torch.log_softmax(model(ids, use_cache=False).logits[0, :-1].float(), -1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0].cpu().numpy()


def check_logprobs(model: PreTrainedModel, completions: list[Completion]) -> None:
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        expected = plain(model, [*prompt, *completion.tokens.tolist()])[len(prompt) - 1 :]
        assert np.abs(completion.logprobs - expected).max() < 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gpt2", "bloom", "gemma2", "gpt_oss", "mixtral", "deepseek_v3"])
def test_module_engine_agrees_with_transformers_before_and_after_step(
    name: str, dtype: str
) -> None:
    model = tiny_architecture(name).cuda()
    reference = copy.deepcopy(model)
    trainer = SingleDevice(model, TrainSettings(dtype=dtype))
    engine = NativeEngine(
        model.config, trainer.shared_weights(LONGEST), slots=4, max_length=LONGEST
    )
    completions = generate(engine)
    check_logprobs(reference, completions)
    rows = batch(PROMPTS, completions)
    sampled = np.concatenate([completion.logprobs for completion in completions])
    error = np.abs(trainer.logprobs(rows)[rows.mask] - sampled)
    assert error.mean() < (1e-3 if dtype == "float32" else 0.1)
    trainer.forward_backward(rows, Likelier())
    trainer.optimizer_step(0.05)
    engine.set_version(1)
    reference.load_state_dict(model.state_dict())
    check_logprobs(reference, generate(engine))
