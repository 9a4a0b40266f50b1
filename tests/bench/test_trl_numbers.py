"""Losses, gradients and advantages compared with TRL's code on the same random numbers.

Runs in a separate environment with TRL (`make test-bench`), not with the other tests.
"""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from paceline.algo.advantage import advantages
from paceline.algo.loss import PolicyLoss, TokenData, TokenOutputs
from paceline.algo.settings import AlgorithmSettings
from paceline.types import Batch

ROWS, LENGTH = 6, 9


class Numbers:
    """Random log-probs and advantages of completions of different lengths.

    The first completion contains tokens of a tool.
    """

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        lengths = rng.integers(2, LENGTH + 1, ROWS)
        self.mask = np.arange(LENGTH)[None, :] < lengths[:, None]
        self.mask[0, :LENGTH] = True
        self.mask[0, 3:5] = False
        self.old = -rng.random((ROWS, LENGTH)) * 2 - 0.2
        self.new = self.old + rng.standard_normal((ROWS, LENGTH)) * 0.5
        self.ref = self.old + rng.standard_normal((ROWS, LENGTH)) * 0.3
        self.advantages = rng.standard_normal(ROWS)

    def trl(self, compute: Callable[..., Tensor], **settings: Any) -> tuple[float, np.ndarray]:
        """Return the loss and its gradient by log-prob.

        The trainer's method runs on a stand-in that has only the attributes it reads.
        """
        new = torch.from_numpy(self.new).requires_grad_()
        defaults = {
            "delta": None,
            "sapo_temperature_pos": 1.0,
            "sapo_temperature_neg": 1.05,
            "use_bias_correction_kl": False,
        }
        given = {name: settings.pop(name) for name in list(settings) if name in defaults}
        args = SimpleNamespace(steps_per_generation=1, **defaults | given)
        one_process = SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
        )
        values = {
            "loss_type": "grpo",
            "importance_sampling_level": "token",
            "epsilon_low": 0.2,
            "epsilon_high": 0.2,
            "beta": 0.0,
            "max_completion_length": LENGTH,
            "top_entropy_quantile": 1.0,
            "off_policy_mask_threshold": None,
            "use_vllm": False,
            "aux_loss_enabled": False,
            "current_gradient_accumulation_steps": 1,
            "_entropy_bonus_enabled": False,
        }
        trainer = SimpleNamespace(
            args=args,
            accelerator=one_process,
            model=SimpleNamespace(training=True),
            _metrics={"train": defaultdict(list)},
            _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.zeros_like(new), None),
            **values | settings,
        )
        mask = torch.from_numpy(self.mask).double()
        old = torch.from_numpy(self.old)
        nothing = torch.zeros(ROWS, 0, dtype=torch.long)
        inputs = {
            "prompt_ids": nothing,
            "prompt_mask": nothing,
            "completion_ids": torch.zeros(ROWS, LENGTH, dtype=torch.long),
            "completion_mask": mask,
            "advantages": torch.from_numpy(self.advantages),
            "old_per_token_logps": old,
            "old_logps": (old * mask).sum(1),
            "ref_per_token_logps": torch.from_numpy(self.ref),
            "num_items_in_batch": mask.sum(),
        }
        loss = compute(trainer, None, inputs)
        loss.backward()
        assert new.grad is not None
        return float(loss.detach()), new.grad.numpy()

    def paceline(self, **algorithm: Any) -> tuple[float, np.ndarray]:
        flat, row = self.mask.ravel(), np.repeat(np.arange(ROWS), LENGTH)
        zeros = np.zeros(ROWS * LENGTH, np.float32)
        tokens, lengths = zeros.astype(np.int32), np.full(ROWS, LENGTH, np.int32)
        batch = Batch(tokens, lengths, flat, zeros, tokens, zeros[:ROWS], lengths)
        loss = PolicyLoss(AlgorithmSettings.model_validate(algorithm), max_length=LENGTH)
        weights = torch.from_numpy(loss.weights(batch)[flat]).double()

        def pick(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values.ravel()[flat])

        new = pick(self.new).requires_grad_()
        advantage = torch.from_numpy(self.advantages[row][flat])
        data = TokenData(
            torch.from_numpy(row[flat]),
            weights,
            pick(self.old),
            torch.zeros(len(new)),
            advantage,
            ref_logprobs=pick(self.ref),
        )
        total = loss(TokenOutputs(new, torch.zeros_like(new)), data).loss
        total.backward()
        assert new.grad is not None
        gradient = np.zeros(ROWS * LENGTH)
        gradient[flat] = new.grad.numpy()
        return float(total.detach()), gradient.reshape(ROWS, LENGTH)


PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "GRPO": ({}, {"name": "grpo"}),
    "GRPO with KL": ({"beta": 0.04}, {"name": "grpo", "kl_coef": 0.04}),
    "two-sided clip": ({"delta": 1.4}, {"name": "grpo", "dual_clip": 1.4}),
    "Dr.GRPO": ({"loss_type": "dr_grpo"}, {"name": "dr_grpo"}),
    "DAPO": ({"loss_type": "dapo", "epsilon_high": 0.28}, {"name": "dapo"}),
    "BNPO": ({"loss_type": "bnpo"}, {"name": "grpo", "aggregation": "token"}),
    "GSPO": (
        {"importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04},
        {"name": "gspo", "clip_low": 0.03, "clip_high": 0.04},
    ),
    "CISPO": ({"loss_type": "cispo", "epsilon_high": 1.2}, {"name": "cispo", "clip_high": 0.2}),
    "SAPO": ({"loss_type": "sapo"}, {"name": "sapo"}),
    "SAPO, sharper": (
        {"loss_type": "sapo", "sapo_temperature_neg": 2.0},
        {"name": "sapo", "sapo_temperatures": (1.0, 2.0)},
    ),
}


@pytest.mark.parametrize("case", PAIRS)
@pytest.mark.parametrize("seed", range(4))
def test_loss_gradient_matches_trl(case: str, seed: int) -> None:
    trl_settings, algorithm = PAIRS[case]
    numbers = Numbers(seed)
    expected, expected_gradient = numbers.trl(GRPOTrainer._compute_loss, **trl_settings)
    found, gradient = numbers.paceline(**algorithm)
    # Paceline's token weights and TRL's SAPO temperatures are float32.
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-7)
    assert np.abs(gradient - expected_gradient).max() < 1e-7
    assert np.abs(expected_gradient).max() > 1e-3


@pytest.mark.parametrize("seed", range(4))
def test_rloo_gradient_matches_trl_on_fresh_completions(seed: int) -> None:
    """TRL clips the ratio of the completion, Paceline that of each token; both are 1 here."""
    numbers = Numbers(seed)
    numbers.mask[0] = True  # TRL's RLOO does not support tool tokens
    numbers.new = numbers.old.copy()
    _, expected = numbers.trl(RLOOTrainer._compute_loss)
    _, gradient = numbers.paceline(name="rloo", constant_length=1)
    assert np.abs(gradient - expected).max() < 1e-7 and np.abs(expected).max() > 1e-3


def trl_advantages(
    kind: str, output_dir: Path, rewards: list[float], group_size: int, **settings: Any
) -> list[float]:
    """Return the advantages of a TRL trainer whose toy model's completions get these rewards."""
    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "go": 2}, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
    )
    shape = {
        "vocab_size": 8,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = Qwen2ForCausalLM(
        Qwen2Config(**shape, num_key_value_heads=2, pad_token_id=0, eos_token_id=1)
    )
    trainer_type, config_type = {
        "grpo": (GRPOTrainer, GRPOConfig),
        "rloo": (RLOOTrainer, RLOOConfig),
    }[kind]
    config = config_type(
        output_dir=str(output_dir),
        per_device_train_batch_size=len(rewards),
        num_generations=group_size,
        max_completion_length=4,
        beta=0.0,
        use_cpu=True,
        bf16=False,
        report_to="none",
        steps_per_generation=1,
        gradient_accumulation_steps=1,
        **settings,
    )
    prompts = Dataset.from_list([{"prompt": "go"}] * len(rewards))
    trainer = trainer_type(
        model, lambda **_: rewards, args=config, train_dataset=prompts, processing_class=tokenizer
    )
    trainer.model.train()
    result: list[float] = trainer._generate_and_score_completions(
        [{"prompt": "go"}] * len(rewards)
    )["advantages"].tolist()
    return result


@pytest.mark.parametrize(
    ("kind", "settings", "algorithm"),
    [
        ("grpo", {"scale_rewards": "group"}, {"name": "grpo"}),
        ("grpo", {"scale_rewards": "none"}, {"name": "dr_grpo"}),
        ("rloo", {}, {"name": "rloo"}),
        ("rloo", {"normalize_advantages": True}, {"name": "rloo", "normalize": "batch"}),
    ],
)
def test_advantages_match_trl(
    kind: str, settings: dict[str, Any], algorithm: dict[str, Any], tmp_path: Path
) -> None:
    size, rng = 4, np.random.default_rng(0)
    rewards = rng.standard_normal(3 * size).astype(np.float32)
    expected = trl_advantages(kind, tmp_path, rewards.tolist(), size, **settings)
    rows = len(rewards)
    mask, flat = np.tile([False, True], rows), np.zeros(2 * rows, np.float32)
    groups = np.repeat(np.arange(3, dtype=np.int32), size)
    batch = Batch(
        flat.astype(np.int32),
        np.full(rows, 2, np.int32),
        mask,
        flat,
        flat.astype(np.int32),
        rewards,
        groups,
    )
    found = advantages(batch, AlgorithmSettings.model_validate(algorithm)).advantages
    assert found is not None
    # TRL adds 1e-4 to a standard deviation, Paceline 1e-6. Over the batch, TRL divides by the
    # sample standard deviation, Paceline by that of the population.
    scale = np.sqrt((rows - 1) / rows) if algorithm.get("normalize") == "batch" else 1.0
    assert (found[mask] * scale).tolist() == pytest.approx(expected, rel=1e-3, abs=1e-6)
