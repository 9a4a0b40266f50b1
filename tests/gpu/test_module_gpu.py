"""Models without a fast path, on a GPU: the engine over the module says what transformers says, and sees what training changes."""

import numpy as np
import pytest
import torch

from paceline.rollout.native.engine import NativeEngine
from paceline.rollout.native.module import ModuleWeights, engine_weights
from paceline.train.settings import TrainSettings
from paceline.train.single import SingleDevice
from tests.architectures import tiny_architecture
from tests.unit.test_architectures import LONGEST, PROMPTS, Likelier, batch, generate, plain_logprobs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
NAMES = ["gpt2", "gpt_neox", "gemma2", "gpt_oss", "mixtral", "phi3"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_and_trainer_say_what_transformers_says_and_go_on_together(name: str, dtype: str) -> None:
    exact, model = tiny_architecture(name), tiny_architecture(name).cuda()
    trainer = SingleDevice(model, TrainSettings(dtype=dtype))
    if dtype == "float32":
        weights = trainer.lend_weights(LONGEST)
    else:
        weights = engine_weights(model, share=False, max_length=LONGEST, dtype=torch.bfloat16)
    assert isinstance(weights, ModuleWeights)
    engine = NativeEngine(model.config, weights, slots=4, max_length=LONGEST)
    for version in range(2):
        done = generate(engine)
        found = trainer.logprobs(rows := batch(PROMPTS, done))
        expected = [
            plain_logprobs(exact, [*prompt, *c.tokens.tolist()])[len(prompt) - 1 :] for prompt, c in zip(PROMPTS, done, strict=True)
        ]
        for said in (np.concatenate([c.logprobs for c in done]), found[rows.mask]):
            gap = np.abs(said - np.concatenate(expected))
            assert gap.max() < 1e-3 if dtype == "float32" else gap.mean() < 0.1, f"version {version}"
        trainer.forward_backward(rows, Likelier())
        trainer.optimizer_step(0.01)
        exact.load_state_dict({key: value.cpu() for key, value in model.state_dict().items()})
        if dtype == "bfloat16":
            engine.load(dict(model.named_parameters()), 1)
        else:
            engine.set_version(1)
