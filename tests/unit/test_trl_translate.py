"""What the fields of a GRPOConfig mean in Paceline's settings."""

from typing import Any

import pytest

from paceline.config import RunConfig, load_config
from paceline.errors import ConfigError
from paceline.trl import GRPOConfig
from paceline.trl.translate import plan, settings


def translated(rows: int = 100, **fields: Any) -> RunConfig:
    args = GRPOConfig("out", **fields)
    return load_config(values=settings(args, plan(args, rows)))


def test_default_batch_is_one_prompt_per_update() -> None:
    config = translated()
    assert (config.groups_per_step, config.group_size) == (1, 8)
    assert config.algorithm.updates_per_step == 1
    assert config.steps == 300  # three epochs of 100 prompts


@pytest.mark.parametrize(
    ("fields", "groups", "mini_batches"),
    [
        ({"gradient_accumulation_steps": 4}, 4, 1),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 8}, 8, 4),
        ({"generation_batch_size": 64}, 8, 8),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 1}, 4, 1),
        ({"per_device_train_batch_size": 12, "num_generations": 4}, 3, 1),
    ],
)
def test_batch_sizes_keep_completions_per_update(
    fields: dict[str, int], groups: int, mini_batches: int
) -> None:
    config = translated(**fields)
    assert (config.groups_per_step, config.algorithm.mini_batches) == (groups, mini_batches)
    per_update = config.groups_per_step * config.group_size // config.algorithm.mini_batches
    size = fields.get("per_device_train_batch_size", 8)
    assert per_update == size * fields.get("gradient_accumulation_steps", 1)


def test_number_of_updates_is_that_of_trl() -> None:
    fields = {"steps_per_generation": 4, "num_iterations": 2, "max_steps": 24}
    config = translated(**fields)
    assert config.algorithm.updates_per_step == 8
    assert config.steps * config.algorithm.updates_per_step == 24


def test_epochs_count_whole_generation_batches() -> None:
    assert translated(rows=10, gradient_accumulation_steps=4, num_train_epochs=2).steps == 4


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"num_generations": 3}, "num_generations = 3 does not divide the 8 completions"),
        ({"num_generations": 1}, "num_generations = 1: GRPO compares"),
        ({"gradient_accumulation_steps": 3, "steps_per_generation": 4}, "do not align"),
        ({"generation_batch_size": 12}, "not a multiple of per_device_train_batch_size = 8"),
        ({"generation_batch_size": 8, "steps_per_generation": 1}, "are both set"),
        ({"loss_type": "vespo"}, "loss_type = 'vespo' cannot be honored: use 'grpo' or"),
        ({"loss_type": "cispo"}, "epsilon_high = None cannot be honored"),
        ({"loss_type": "sapo", "importance_sampling_level": "sequence"}, "only 'token'"),
        ({"loss_type": "sapo", "delta": 4.0}, "delta = 4.0"),
        ({"loss_type": "grpo", "entropy_coef": 0.1}, "entropy_coef = 0.1"),
        ({"scale_rewards": "batch"}, "scale_rewards = 'batch'"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type = 'polynomial'"),
        ({"optim": "paged_adamw_8bit"}, "optim = 'paged_adamw_8bit'"),
        ({"save_strategy": "best"}, "save_strategy = 'best'"),
        (
            {"report_to": ["comet_ml"]},
            "report_to = \\['comet_ml'\\] cannot be honored: use 't",
        ),
        ({"model_init_kwargs": {"revision": "x"}}, "model_init_kwargs"),
        ({"model_init_kwargs": "revision"}, "expected a dict"),
        ({"max_steps": None}, "max_steps = None; expected a number"),
        ({"generation_batch_size": "8"}, "generation_batch_size = '8'; expected a number"),
        ({"generation_batch_size": 0}, "not a multiple of per_device_train_batch_size = 8"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps = 0; expected at least"),
        ({"warmup_steps": float("nan")}, "warmup_steps = nan; expected a number"),
        ({"scale_rewards": ["group"]}, "scale_rewards = "),
    ],
)
def test_value_without_counterpart_is_rejected_by_name(
    fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        translated(**fields)


@pytest.mark.parametrize(
    ("given", "trackers"),
    [("none", ()), (None, ()), ([], ()), ("wandb", ("wandb",)), (["mlflow", "none"], ("mlflow",))],
)
def test_report_to_names_trackers(given: Any, trackers: tuple[str, ...]) -> None:
    assert tuple(map(str, translated(report_to=given).track)) == trackers


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ("clip", "token", "group")),
        ({"loss_type": "grpo"}, ("clip", "sequence", "group")),
        ({"loss_type": "dr_grpo", "scale_rewards": False}, ("clip", "constant", "none")),
        ({"loss_type": "sapo"}, ("sapo", "sequence", "group")),
        ({"importance_sampling_level": "sequence"}, ("sequence_clip", "token", "group")),
    ],
)
def test_loss_type_selects_objective_and_mean(fields: dict[str, Any], expected: Any) -> None:
    algorithm = translated(**fields).algorithm
    assert (algorithm.loss, algorithm.aggregation, algorithm.normalize) == expected


def test_clip_ranges_follow_epsilon_and_delta() -> None:
    algorithm = translated(epsilon=0.1, epsilon_high=0.3, delta=2.0).algorithm
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip) == (0.1, 0.3, 2.0)


def test_cispo_bounds_weight_at_epsilon_high() -> None:
    assert translated(loss_type="cispo", epsilon_high=5.0).algorithm.clip_high == 4.0


@pytest.mark.parametrize(("corrected", "estimator"), [(True, "k2"), (False, "k3")])
def test_beta_adds_kl_with_gradient_of_trl(corrected: bool, estimator: str) -> None:
    algorithm = translated(beta=0.04, use_bias_correction_kl=corrected).algorithm
    assert (algorithm.kl_coef, algorithm.kl_estimator) == (0.04, estimator)


def test_vllm_log_probs_are_corrected() -> None:
    config = translated(use_vllm=True, vllm_importance_sampling_mode="token_truncate")
    assert config.rollout.engine == "vllm"
    assert config.algorithm.correction == "truncate"
    assert config.algorithm.correction_range == (0.0, 3.0)


def test_optimizer_is_that_of_trl() -> None:
    assert translated().train.betas == (0.9, 0.999)
    assert translated().train.staleness_kl_target == 0
    assert translated(adam_beta1=0.8, adam_beta2=0.99).train.betas == (0.8, 0.99)


def test_schedule_is_counted_in_train_steps() -> None:
    config = translated(max_steps=80, steps_per_generation=4, warmup_ratio=0.1, save_steps=20)
    assert (config.steps, config.train.warmup_steps, config.save_every) == (20, 2, 5)
    assert config.train.lr_schedule == "linear"


@pytest.mark.parametrize(
    ("bf16", "gpu", "fast", "dtype"),
    [
        (None, True, False, "bfloat16"),
        (None, False, True, "bfloat16"),
        (None, False, False, "float32"),
        (False, True, True, "float32"),
        (True, False, False, "bfloat16"),
    ],
)
def test_bf16_selects_dtype(
    bf16: bool | None, gpu: bool, fast: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr("paceline.trl.translate.has_fast_bfloat16", lambda: fast)
    assert translated(bf16=bf16).train.dtype == dtype


def test_paceline_settings_win_over_translated_fields() -> None:
    extra = {"schedule.max_staleness": 2, "rollout.temperature": 0.7}
    config = translated(temperature=0.9, paceline=extra)
    assert (config.schedule.max_staleness, config.rollout.temperature) == (2, 0.7)


def test_custom_advantage_is_not_divided_by_standard_deviation_of_group() -> None:
    def centered(rewards: Any) -> Any:
        return rewards - rewards.mean()

    for advantage in (centered, "examples/custom_advantage.py:minus_median"):
        nested = {"algorithm": {"advantage": advantage}}
        assert translated(paceline=nested).algorithm.normalize == "none"
    assert translated(paceline={"algorithm.advantage": "group"}).algorithm.normalize == "group"
