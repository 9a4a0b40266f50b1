"""Distillation: its gradient against exact formulas, teachers that are rejected, their memory."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from paceline.algo.advantage import advantages
from paceline.algo.loss import PolicyLoss, TokenData, TokenOutputs
from paceline.algo.settings import AlgorithmSettings
from paceline.config import check_trainable, load_config
from paceline.data.tiny import make_tokenizer
from paceline.early_checks import check_early
from paceline.errors import ConfigError, ModelError
from paceline.inputs import load_inputs
from paceline.model.known_shapes import known_shape
from paceline.training.memory import parameter_count
from paceline.training.service import UNKNOWN_TOKEN, RefService
from paceline.training.settings import TrainSettings
from paceline.training.single import SingleDevice
from paceline.types import Batch, Role
from paceline.workers.cluster import Device, PlannedWorker
from paceline.workers.phase_memory import Models, Phase, WorkerMemory
from tests.contract.test_train_engine import random_batch, tiny
from tests.models import random_model

DISTILL = AlgorithmSettings(name="distill")


def logprobs_of(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Return the log-prob of each trained token from a plain forward pass."""
    found = []
    for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        row = torch.from_numpy(batch.tokens[start:end].astype(np.int64))
        every = model(row[None]).logits[0, :-1].float().log_softmax(-1)
        logprobs = every.gather(-1, row[1:, None])[:, 0]
        found.append(logprobs[torch.from_numpy(batch.mask[start + 1 : end])])
    return torch.cat(found)


def batch_for(student: SingleDevice, teacher: SingleDevice) -> Batch:
    batch = random_batch()
    sampled = replace(batch, logprobs=student.logprobs(batch))
    return replace(sampled, ref_logprobs=teacher.logprobs(batch))


def test_gradient_equals_that_of_reverse_kl_over_whole_vocabulary() -> None:
    torch.manual_seed(0)
    logits = torch.randn(11, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(11, dtype=torch.float64).log_softmax(-1)
    policy = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits)
    sampled = logits.detach().log_softmax(-1)  # every token once, with its probability as weight
    rows = torch.arange(11)
    data = TokenData(rows, sampled.exp(), sampled, rows * 0, advantages=teacher - sampled)
    loss = PolicyLoss(DISTILL)(TokenOutputs(logits.log_softmax(-1), torch.zeros(11)), data).loss
    (found,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(found, exact)


@pytest.mark.parametrize("coefficient", [1.0, 0.3])
def test_gradient_of_batch_equals_formula(coefficient: float) -> None:
    settings = AlgorithmSettings(name="distill", kl_coef=coefficient)
    student = SingleDevice(tiny("qwen2"), TrainSettings())
    teacher = SingleDevice(tiny("llama"), TrainSettings())
    batch = advantages(batch_for(student, teacher), settings)
    student.forward_backward(batch, PolicyLoss(settings))
    plain = tiny("qwen2")
    own, other = logprobs_of(plain, batch), logprobs_of(teacher.model, batch).detach()
    (-coefficient * (other - own.detach()) * own).mean().backward()
    gradients = {name: weight.grad for name, weight in plain.named_parameters()}
    for name, weight in student.model.named_parameters():
        torch.testing.assert_close(weight.grad, gradients[name], rtol=1e-3, atol=1e-6)


def test_advantage_is_difference_of_logprobs_of_each_token() -> None:
    batch = replace(random_batch(), ref_logprobs=np.full(random_batch().num_tokens, -2, np.float32))
    found = advantages(batch, DISTILL).advantages
    assert found is not None and found[batch.mask] == pytest.approx(-2 - batch.logprobs[batch.mask])
    assert not found[~batch.mask].any()


def test_reward_is_added_to_term_of_teacher() -> None:
    batch = replace(random_batch(), ref_logprobs=np.full(random_batch().num_tokens, -2, np.float32))
    combined = AlgorithmSettings(name="distill", advantage="group", kl_coef=0.1)
    alone = AlgorithmSettings(name="dr_grpo")
    parts = [advantages(batch, settings).advantages for settings in (combined, alone)]
    assert parts[0] is not None and parts[1] is not None
    term = 0.1 * (-2 - batch.logprobs)
    assert (parts[0] - parts[1])[batch.mask] == pytest.approx(term[batch.mask], abs=1e-6)


def test_adapted_coefficient_replaces_that_of_settings() -> None:
    batch = replace(random_batch(), ref_logprobs=np.full(random_batch().num_tokens, -2, np.float32))
    once, twice = (advantages(batch, DISTILL, kl_coef=c).advantages for c in (None, 2.0))
    assert once is not None and twice == pytest.approx(2 * once)


def test_token_of_padding_is_improbable_for_teacher_with_less_padding() -> None:
    teacher = SingleDevice(tiny("qwen2"), TrainSettings())
    batch = random_batch()
    place = int(np.flatnonzero(batch.mask)[0])
    tokens = batch.tokens.copy()
    tokens[place] = 40  # the vocabulary has 37 tokens
    found = RefService(teacher, vocabulary=37).logprobs(replace(batch, tokens=tokens))
    assert found[place] == UNKNOWN_TOKEN
    plain = RefService(teacher, vocabulary=37).logprobs(batch)
    assert (plain == teacher.logprobs(batch)).all()


def settings_for(model: str, teacher: str, *more: str) -> list[str]:
    return [
        *(f"model={model}", f"algorithm.teacher={teacher}", "algorithm.name=distill"),
        *("data.task=copy:3", "data.max_prompt_length=32", "rollout.max_response_length=8", *more),
    ]


def test_run_does_not_start_when_vocabulary_of_teacher_differs(tmp_path: Path) -> None:
    model, teacher = random_model(tmp_path / "model"), random_model(tmp_path / "teacher")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(teacher)
    with pytest.raises(ModelError, match=r"teacher = .* 1 differ, for example '<think>'; expected"):
        load_inputs(load_config(None, settings_for(model, teacher)))


def test_run_does_not_start_when_end_token_of_teacher_differs(tmp_path: Path) -> None:
    model, teacher = random_model(tmp_path / "model"), random_model(tmp_path / "teacher")
    tokenizer = make_tokenizer()
    tokenizer.eos_token = tokenizer.pad_token
    tokenizer.save_pretrained(teacher)
    with pytest.raises(ModelError, match=r"its eos_token is '<pad>' \(ID 0\), that of model = "):
        load_inputs(load_config(None, settings_for(model, teacher)))


def test_teacher_may_have_another_size_and_padding(tmp_path: Path) -> None:
    model = random_model(tmp_path / "model")
    teacher = random_model(tmp_path / "teacher", hidden=64, layers=3, padding=5)
    inputs = load_inputs(load_config(None, settings_for(model, teacher)))
    assert inputs.identity["teacher"] != inputs.identity["model"]


def test_distillation_without_teacher_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"learns from a teacher alone.*set algorithm\.teacher"):
        load_config(None, ["algorithm.name=distill"])


def test_policy_cannot_be_its_own_teacher() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.teacher = 'tiny' is the policy itself"):
        check_trainable(load_config(None, ["algorithm.name=distill", "algorithm.teacher=tiny"]))


def test_wrong_teacher_is_named_before_torch_is_imported() -> None:
    with pytest.raises(ModelError, match=r"algorithm\.teacher = '\./nothing': no such file"):
        check_early(load_config(None, settings_for("tiny", "./nothing")))


def test_prompts_need_reward_unless_run_trains_on_teacher_alone(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    data = [f"data.path={tmp_path}/prompts.jsonl", f"run_dir={tmp_path}/run"]
    distill = ["algorithm.name=distill", "algorithm.teacher=tiny-teacher"]
    check_early(load_config(None, [*data, *distill]))
    with pytest.raises(ConfigError, match="need a reward"):
        check_early(load_config(None, [*data, *distill, "algorithm.advantage=group"]))
    with pytest.raises(ConfigError, match="need a reward"):
        check_early(load_config(None, [*data, *distill]), trains=False)


@pytest.mark.parametrize("more", [[], ["train.lora.rank=8"]], ids=["full", "LoRA"])
def test_plan_counts_teacher_with_its_size(more: list[str], tmp_path: Path) -> None:
    known_shape("7b").save_pretrained(tmp_path)
    config = load_config(None, ["algorithm.name=distill", f"algorithm.teacher={tmp_path}", *more])
    roles = (Role.ACTOR, Role.REF, Role.ROLLOUT)
    plan = PlannedWorker("main", roles, devices=(Device("a", 0),))
    models = Models.of(config, known_shape("1.5b"))
    found = WorkerMemory(plan, config, models).phases()[Phase.TRAIN]
    assert found["ref parameters"].fixed == 4 * parameter_count(known_shape("7b"))
    assert found["actor parameters"].fixed == 4 * parameter_count(known_shape("1.5b"))
