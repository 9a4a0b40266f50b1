"""GRPOConfig: every field of TRL 1.16's class, in one of three tables.

TRANSLATED fields become Paceline's settings (`translate.py`). ACCEPTED fields change nothing here,
whatever their value. REJECTED fields are accepted only with TRL's default, because another value
would have to change the run and cannot. Defaults are those of TRL.
"""

import difflib
import math
import os
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

from paceline.config.loading import given_settings
from paceline.errors import ConfigError
from paceline.trl.fields import dataclass_of

TRANSLATED: dict[str, Any] = {
    "output_dir": None,
    "seed": 42,
    # Sizes
    "max_steps": -1,
    "num_train_epochs": 3.0,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "generation_batch_size": None,
    "steps_per_generation": None,
    "num_generations": 8,
    "num_generations_eval": None,
    "num_iterations": 1,
    "max_completion_length": 512,
    "shuffle_dataset": True,
    # Sampling
    "temperature": 1.0,
    "use_vllm": False,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
    "vllm_importance_sampling_cap": None,
    # Objective
    "beta": 0.0,
    "use_bias_correction_kl": True,
    "epsilon": 0.2,
    "epsilon_high": None,
    "delta": None,
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "scale_rewards": "group",
    "reward_weights": None,
    "mask_truncated_completions": False,
    "entropy_coef": 0.0,
    # Optimizer
    "learning_rate": 1e-6,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "optim": "adamw_torch_fused",
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "max_grad_norm": 1.0,
    "bf16": None,
    "gradient_checkpointing": None,  # TRL's default is True; it saves memory and changes no result
    # Logging and checkpoints
    "logging_strategy": "steps",
    "logging_steps": 10,
    "logging_first_step": False,
    "log_completions": False,
    "num_completions_to_print": None,
    "log_unique_prompts": False,
    "disable_tqdm": None,
    "save_strategy": "steps",
    "save_steps": 500,
    "save_total_limit": None,
    # For the callback that stops early
    "metric_for_best_model": None,
    "greater_is_better": None,
    # Checked, then left to the run
    "model_init_kwargs": None,
    "router_aux_loss_coef": None,
    "use_cpu": False,
    "report_to": "none",
    # Fields of earlier versions of TRL
    "warmup_ratio": None,
    "max_prompt_length": None,
}
OPTIONAL_NUMBERS = {"generation_batch_size", "steps_per_generation", "warmup_ratio"}
# Not fields of TRL 1.16, but of earlier versions, so scripts still set them.
EARLIER = {"warmup_ratio", "max_prompt_length", "overwrite_output_dir", "save_safetensors"}
EARLIER |= {"logging_dir", "group_by_length"}

ACCEPTED: dict[str, Any] = {
    # They change speed or memory in TRL. Paceline packs rows, has no padding and one data loader.
    "tf32": None,
    "torch_compile": False,
    "torch_compile_backend": None,
    "torch_compile_mode": None,
    "use_liger_kernel": False,
    "liger_kernel_config": None,
    "use_cache": False,
    "gradient_checkpointing_kwargs": None,
    "torch_empty_cache_steps": None,
    "pad_to_multiple_of": "auto",
    "cache_implementation": None,
    "use_transformers_continuous_batching": False,
    "transformers_continuous_batching_config": None,
    "use_transformers_paged": False,
    "ds3_gather_for_generation": True,
    "dataloader_drop_last": False,
    "dataloader_num_workers": 0,
    "dataloader_pin_memory": True,
    "dataloader_persistent_workers": False,
    "dataloader_prefetch_factor": None,
    "dataloader_multiprocessing_context": None,
    "dataloader_in_order": True,
    "group_by_length": False,
    "length_column_name": "length",
    "vllm_enable_sleep_mode": False,
    "vllm_gpu_memory_utilization": 0.3,
    "vllm_max_model_length": None,
    # They concern several processes, and the script is one.
    "average_tokens_across_devices": True,
    "ddp_find_unused_parameters": None,
    "ddp_bucket_cap_mb": None,
    "ddp_broadcast_buffers": None,
    "ddp_static_graph": None,
    "ddp_backend": None,
    "ddp_timeout": 1800,
    "local_rank": -1,
    "accelerator_config": None,
    "save_on_each_node": False,
    "log_on_each_node": True,
    "log_level_replica": "warning",
    # How results are shown; metrics.jsonl and samples.jsonl of the run directory have all of them.
    "log_level": "passive",
    "logging_dir": None,
    "logging_nan_inf_filter": True,
    "include_num_input_tokens_seen": "no",
    "run_name": None,
    "project": "huggingface",
    "trackio_space_id": None,
    "trackio_bucket_id": None,
    "trackio_static_space_id": None,
    "log_multimodal": True,
    "skip_memory_metrics": True,
    "debug": "",
    # Details of checkpoints. Paceline's are complete and atomic, and never overwrite another run.
    "save_only_model": False,
    "save_safetensors": True,
    "overwrite_output_dir": False,
    "enable_jit_checkpoint": False,
    "ignore_data_skip": False,
    "restore_callback_states_from_checkpoint": False,
    "resume_from_checkpoint": None,  # scripts pass it to train() themselves
    # Evaluation. It uses the sampling of training.
    "do_train": False,
    "do_eval": False,
    "do_predict": False,
    "eval_strategy": "no",
    "eval_steps": None,
    "eval_on_start": False,  # the first version is always evaluated
    "eval_delay": 0,
    "per_device_eval_batch_size": 8,
    "prediction_loss_only": False,
    "eval_do_concat_batches": True,
    "eval_use_gather_object": False,
    "eval_accumulation_steps": None,
    "include_for_metrics": [],
    "batch_eval_metrics": False,
    "bf16_full_eval": False,
    "fp16_full_eval": False,
    # Reward functions get all columns, and a run depends only on its seed.
    "remove_unused_columns": False,
    "label_names": None,
    "train_sampling_strategy": "random",
    "full_determinism": False,
    # They have no effect on GRPO, or only together with a rejected field.
    "label_smoothing_factor": 0.0,
    "disable_dropout": False,
    "optim_target_modules": None,
    "hub_token": None,
    "hub_private_repo": None,
    "hub_model_id": None,
    "hub_strategy": "every_save",
    "hub_always_push": False,
    "hub_revision": None,
    "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "entropy_coef_min": 0.0,
    "entropy_coef_max": 1.0,
    "entropy_coef_delta": 0.005,
    "entropy_target": 0.2,
    "max_tool_calling_iterations": None,
    "vllm_model_impl": "vllm",
    "vllm_server_base_url": None,
    "vllm_server_host": "0.0.0.0",
    "vllm_server_port": 8000,
    "vllm_server_timeout": 240.0,
    "vllm_group_port": 51216,
}

_PART = (
    "the trainer computes log-probs over the whole vocabulary, so training on completions sampled "
    "from a part of it would use wrong ratios; lower temperature instead"
)
_RANKS = (
    "Paceline starts its processes itself; use paceline={'train.backend': 'fsdp', "
    "'placement.train_ranks': N}"
)
UPLOAD = (
    "upload the directory that trainer.save_model(directory) writes, for example with "
    "huggingface_hub.upload_folder"
)
_BEST = (
    "set paceline={'evaluation.keep_best': True}; the best model is in "
    "output_dir/checkpoints/best/actor"
)
# TRL's default, and why another value cannot be honored, with the nearest setting.
REJECTED: dict[str, tuple[Any, str]] = {
    "top_p": (1.0, _PART),
    "top_k": (0, _PART),
    "min_p": (None, _PART),
    "repetition_penalty": (1.0, _PART),
    "generation_kwargs": (
        None,
        "use the named fields (temperature, max_completion_length), and for stop strings "
        "paceline={'rollout.stop': ['...']}",
    ),
    "chat_template_kwargs": (
        None,
        "prompts are rendered with the tokenizer's chat template as it is; change the template in "
        "the model's directory, or render prompts yourself and pass them as text",
    ),
    "vllm_mode": (
        "colocate",
        "Paceline starts its engines itself; for separate devices use "
        "paceline={'placement.rollout': 'rollout', 'placement.actor': 'train'}",
    ),
    "vllm_tensor_parallel_size": (
        1,
        "Paceline starts its processes itself; use paceline={'rollout.tensor_parallel': N, "
        "'train.backend': 'fsdp', 'placement.train_ranks': N}",
    ),
    "vllm_structured_outputs_regex": (None, _PART),
    "fp16": (False, "there is no float16 training; use bf16=True"),
    "cast_lm_head_to_fp32": (False, "use bf16=False, which computes everything in float32"),
    "trust_remote_code": (False, "models with custom code are not supported"),
    "adam_epsilon": (1e-8, "AdamW's epsilon is fixed to 1e-08"),
    "optim_args": (None, "the optimizer is AdamW with adam_beta1, adam_beta2 and weight_decay"),
    "lr_scheduler_kwargs": (None, "use lr_scheduler_type and warmup_steps"),
    "neftune_noise_alpha": (None, "noise in embeddings would train another policy than sampled"),
    "auto_find_batch_size": (
        False,
        "a batch always fits by its micro-batches; lower paceline={'train.micro_batch_tokens': N}",
    ),
    "deepspeed": (None, _RANKS),
    "fsdp": (None, _RANKS),
    "fsdp_config": (None, _RANKS),
    "parallelism_config": (None, _RANKS),
    "data_seed": (None, "the data order follows seed"),
    "load_best_model_at_end": (False, _BEST),
    "push_to_hub": (False, UPLOAD),
    "log_completions_hub_repo": (None, "completions are in samples.jsonl of output_dir"),
    "multi_objective_aggregation": (
        "sum_then_normalize",
        "rewards are summed, then normalized; set reward_weights instead",
    ),
    "sync_ref_model": (
        False,
        "the reference model is fixed; to bound the change per update, lower epsilon",
    ),
    "top_entropy_quantile": (1.0, "all tokens are trained on; the nearest field is entropy_coef"),
    "use_adaptive_entropy": (False, "the coefficient is fixed; set entropy_coef"),
    "off_policy_mask_threshold": (
        None,
        "the nearest setting is paceline={'algorithm.reject_range': [0.5, 2.0]}",
    ),
}
DEFAULTS = TRANSLATED | ACCEPTED | {name: default for name, (default, _) in REJECTED.items()}


Fields = dataclass_of({"output_dir": None, "paceline": None} | DEFAULTS)


class GRPOConfig(Fields):  # type: ignore[valid-type, misc]
    """TRL's training arguments for GRPO.

    `paceline` holds further settings by their Paceline names, for example
    `{"schedule.max_staleness": 2}` or `{"schedule": {"max_staleness": 2}}`; they override what the
    other fields translate to.
    """

    if TYPE_CHECKING:  # annotations that exist would be types for the parser
        output_dir: str
        paceline: dict[str, Any]
        greater_is_better: bool | None

    def __init__(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        *,
        paceline: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        """Raise ConfigError for a field that does not exist or cannot be honored."""
        for name in fields.keys() - DEFAULTS.keys():
            close = difflib.get_close_matches(name, DEFAULTS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"GRPOConfig has no field {name!r}{hint}")
        given = DEFAULTS | fields | {"output_dir": output_dir, "paceline": paceline}
        for name, value in given.items():
            setattr(self, name, value)
        self.__post_init__()

    def __post_init__(self) -> None:
        """Complete the fields. A subclass that is a dataclass has only this of the constructor."""
        if self.metric_for_best_model is not None and self.greater_is_better is None:
            self.greater_is_better = not str(self.metric_for_best_model).endswith("loss")
        if not isinstance(self.paceline, Mapping | None):
            raise ConfigError(
                f"GRPOConfig: paceline = {self.paceline!r}; expected a dict of settings, for "
                "example {'schedule.max_staleness': 2}"
            )
        self.paceline = dict(given_settings((), self.paceline))  # by dotted names
        self.output_dir = os.path.expanduser(self.output_dir or "trainer_output")
        self.check()

    def check(self) -> None:
        """Raise ConfigError if a field has a value that cannot be honored."""
        for name, default in TRANSLATED.items():
            value = getattr(self, name)
            optional = name in OPTIONAL_NUMBERS
            if (type(default) in (int, float) or (optional and value is not None)) and not (
                isinstance(value, Real) and math.isfinite(value)  # YAML reads 1e-5 as text
            ):
                raise ConfigError(f"GRPOConfig: {name} = {value!r}; expected a number")
        for name, (default, reason) in REJECTED.items():
            value = getattr(self, name)
            # Empty values of any type mean "not set".
            if _plain(value) != default and (value or default):
                raise rejected(name, value, reason)

    def __getattr__(self, name: str) -> Any:
        """Say which attributes exist. Fields are ordinary attributes and do not come here."""
        raise AttributeError(f"GRPOConfig has no attribute {name!r}")

    def __repr__(self) -> str:
        changed = {n: getattr(self, n) for n in DEFAULTS if getattr(self, n) != DEFAULTS[n]}
        return f"GRPOConfig({', '.join(f'{name}={value!r}' for name, value in changed.items())})"

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in DEFAULTS}


def rejected(name: str, value: Any, reason: str) -> ConfigError:
    return ConfigError(f"GRPOConfig: {name} = {value!r} cannot be honored: {reason}")


def _plain(value: Any) -> Any:
    """Return the text of an enumeration such as transformers.IntervalStrategy."""
    return getattr(value, "value", value)
