"""Explanations of wrong settings: what is wrong, what was expected, and which name was meant."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from paceline.settings import all_names, find_section, walk_settings

# Names of other libraries (TRL, verl, OpenRLHF, vLLM, OpenAI), without their sections.
FOREIGN_NAMES = {
    name: setting
    for setting, names in {
        "model": "model_name model_name_or_path model_path pretrain actor_model",
        "run_dir": "output_dir save_path default_local_dir run_name experiment_name",
        "seed": "random_seed",
        "steps": "max_steps total_steps train_steps training_steps num_steps num_train_steps "
        "num_train_epochs total_epochs num_epochs num_episodes",
        "groups_per_step": "batch_size train_batch_size global_batch_size rollout_batch_size "
        "per_device_train_batch_size generation_batch_size num_prompts prompts_per_step",
        "group_size": "num_generations num_return_sequences n num_samples samples_per_prompt "
        "n_samples_per_prompt num_completions rollout_n",
        "track": "report_to logger loggers tracker trackers wandb",
        "evaluation.path": "eval_dataset eval_data eval_files val_data val_files validation_data "
        "test_data test_files",
        "evaluation.every": "eval_steps eval_every eval_interval eval_freq test_freq",
        "save_every": "save_steps save_freq save_interval checkpoint_every",
        "keep_checkpoints": "save_total_limit max_actor_ckpt_to_keep max_ckpt_num",
        "save_samples": "log_completions num_completions_to_print rollout_data_dir",
        "data.path": "dataset dataset_name dataset_path train_files train_file train_data "
        "train_dataset prompt_data",
        "data.prompt_key": "prompt_column input_key question_key",
        "data.answer_key": "label_key answer_column ground_truth ground_truth_key",
        "data.max_prompt_length": "max_prompt_len prompt_max_len prompt_length",
        "data.system": "system_prompt system_message",
        "data.chat": "apply_chat_template chat_template",
        "data.shuffle": "shuffle_dataset shuffle_data",
        "data.limit": "max_samples max_train_samples train_max_samples",
        "reward.function": "reward_fn reward_func reward_funcs reward_function compute_score "
        "custom_reward_function rewards reward_functions",
        "reward.weights": "reward_weights",
        "reward.model": "reward_model reward_model_path reward_pretrain",
        "reward.timeout_s": "reward_timeout",
        "rollout.max_response_length": "max_tokens max_completion_length max_completion_tokens "
        "max_output_tokens max_new_tokens max_length max_response_len generate_max_len "
        "response_length",
        "rollout.temperature": "temp sampling_temperature",
        "rollout.stop": "stop_sequences stop_strings stop_words",
        "rollout.engine": "use_vllm vllm_mode rollout_engine inference_engine",
        "rollout.slots": "max_num_seqs max_concurrency max_concurrent_requests",
        "rollout.kv_memory_fraction": "gpu_memory_utilization vllm_gpu_memory_utilization "
        "mem_fraction_static",
        "rollout.kv_cache_dtype": "kv_dtype kv_cache_type kv_cache_precision",
        "rollout.weight_dtype": "quantization weight_quantization rollout_quantization",
        "rollout.environment": "environment_factory rollout_func agent_loop tools env",
        "rollout.environment_args": "env_args env_kwargs environment_kwargs",
        "rollout.generation_timeout": "request_timeout timeout",
        "algorithm.name": "adv_estimator advantage_estimator algo estimator",
        "algorithm.loss": "loss_type policy_loss loss_mode",
        "algorithm.aggregation": "loss_agg_mode loss_aggregation",
        "algorithm.normalize": "scale_rewards whiten_rewards norm_adv_by_std_in_grpo",
        "algorithm.clip_low": "epsilon clip_ratio clip_ratio_low cliprange clip_range clip_eps "
        "eps_clip epsilon_low",
        "algorithm.clip_high": "epsilon_high clip_ratio_high eps_clip_high",
        "algorithm.dual_clip": "clip_ratio_c delta",
        "algorithm.kl_coef": "beta kl_beta kl_loss_coef init_kl_coef kl_coeff kl_weight "
        "kl_penalty_coef use_kl_loss",
        "algorithm.teacher": "teacher_model teacher_model_name_or_path teacher_path "
        "teacher_model_path distillation_teacher",
        "algorithm.kl_estimator": "kl_loss_type kl_penalty",
        "algorithm.entropy_coef": "entropy_coeff ent_coef entropy_bonus entropy_weight",
        "algorithm.lam": "gae_lambda lambd lambda_ gae_lam",
        "algorithm.value_clip": "cliprange_value value_clip_range",
        "algorithm.epochs": "num_iterations ppo_epochs num_ppo_epochs max_epochs",
        "algorithm.mini_batches": "num_mini_batches ppo_mini_batch_size steps_per_generation "
        "ppo_n_minibatches",
        "algorithm.overlong": "mask_truncated_completions overlong_filtering",
        "algorithm.dynamic_sampling": "filter_groups dynamic_filtering",
        "algorithm.correction": "vllm_importance_sampling_correction rollout_is use_tis",
        "train.backend": "strategy actor_strategy fsdp deepspeed",
        "train.learning_rate": "lr actor_learning_rate policy_lr",
        "train.lr_schedule": "lr_scheduler_type lr_scheduler warmup_style lr_decay_style",
        "train.warmup_steps": "warmup_ratio lr_warmup_steps lr_warmup_ratio num_warmup_steps",
        "train.weight_decay": "l2 wd",
        "train.betas": "adam_beta1 adam_beta2 adam_betas",
        "train.max_grad_norm": "grad_clip clip_grad gradient_clipping max_norm grad_norm_clip",
        "train.micro_batch_tokens": "gradient_accumulation_steps micro_batch_size "
        "micro_train_batch_size ppo_micro_batch_size_per_gpu max_token_len",
        "train.gradient_checkpointing": "enable_gradient_checkpointing activation_checkpointing "
        "recompute",
        "train.dtype": "bf16 fp16 torch_dtype precision model_dtype",
        "train.offload": "param_offload optimizer_offload cpu_offload offload_optimizer",
        "train.lora.rank": "lora_r lora_rank peft_config use_peft use_lora",
        "train.lora.alpha": "lora_alpha",
        "train.lora.targets": "target_modules lora_target_modules",
        "train.tensor_parallel": "tp tp_size tensor_parallel_size tensor_model_parallel_size",
        "train.pipeline_parallel": "pp pp_size pipeline_model_parallel_size",
        "schedule.max_staleness": "staleness max_off_policyness max_head_offpolicyness "
        "async_level max_async_level off_policy_steps",
        "schedule.sync_every": "trigger_parameter_sync_step sync_steps update_weights_interval",
        "schedule.on_sync": "partial_rollout",
        "queue.max_queue_size": "queue_size buffer_size",
        "placement.train_ranks": "n_gpus num_gpus n_gpus_per_node world_size num_processes "
        "actor_num_gpus_per_node",
        "placement.rollout_workers": "num_workers num_rollout_workers vllm_num_engines "
        "data_parallel_size",
    }.items()
    for name in names.split()
}


def explain(problem: ErrorDetails, model: type[BaseModel]) -> list[str]:
    """Return one line per mistake that pydantic found in the settings of `model`."""
    location = ".".join(str(part) for part in problem["loc"])
    given = problem["input"]
    if problem["type"] == "extra_forbidden":
        names = [f"{location}.{name}" for name in _leaves(given)] or [location]
        return [f"unknown setting {name!r}; {suggest(name, model)}" for name in names]
    if problem["type"] == "value_error":
        what = str(problem["ctx"]["error"])
        section = problem["loc"][0] if location else ""
        named = not location or what.startswith((f"{section}.", f"{section} = "))
        return [what if named else f"{location}: {what}"]
    if problem["type"] == "model_type":
        first = next(iter(find_section(model, problem["loc"]).model_fields))
        return [
            f"{location} = {given!r}: {location} is a section; set one of its settings, "
            f"for example {location}.{first}=..."
        ]
    if problem["type"] == "tuple_type":
        return [f"{location} = {given!r}: expected a list in brackets"]
    return [f"{location} = {given!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}"]


def suggest(name: str, model: type[BaseModel]) -> str:
    """Return a hint which setting of `model` an unknown name stands for."""
    section, _, last = name.rpartition(".")
    by_name: dict[str, list[str]] = {}  # settings by each of their names without the section
    for setting, field in walk_settings(model):
        for each in all_names(setting, field):
            by_name.setdefault(each, []).append(setting)
    names = {setting for settings in by_name.values() for setting in settings}
    found = (
        by_name.get(last)
        or _existing(_foreign(name), names)
        or _existing(_close(last, section, by_name), names)
    )
    if found:
        return f"did you mean {' or '.join(map(repr, found))}?"
    here = list(find_section(model, section.split(".") if section else ()).model_fields)
    known = section.split(".")[0] in model.model_fields
    command = getattr(model, "LISTED_BY", "paceline settings")
    return f"known here: {', '.join(here)}" if known else f"`{command}` lists all settings"


def _existing(settings: list[str], names: set[str]) -> list[str]:
    """Return those settings that a model has; supervised runs have rows instead of groups."""
    own = [
        "rows_per_step" if setting == "groups_per_step" not in names else setting
        for setting in settings
    ]
    return [setting for setting in own if setting in names]


def _foreign(name: str) -> list[str]:
    parts = name.lower().split(".")
    found = FOREIGN_NAMES.get(parts[-1]) or FOREIGN_NAMES.get(parts[0])
    if found == "algorithm.clip_low" and not parts[-1].endswith("_low"):
        return [found, "algorithm.clip_high"]
    return [found] if found else []


def _close(last: str, section: str, by_name: Mapping[str, list[str]]) -> list[str]:
    """Return the setting with the most similar name, in the same section if there is one."""
    same = [n for n, settings in by_name.items() if any(_in(section, s) for s in settings)]
    for names in (same, by_name):
        if close := difflib.get_close_matches(last, names, n=1, cutoff=0.7):
            settings = by_name[close[0]]
            return [s for s in settings if _in(section, s)] or settings
    if close := difflib.get_close_matches(last, FOREIGN_NAMES, n=1, cutoff=0.85):
        return [FOREIGN_NAMES[close[0]]]
    return []


def _in(section: str, setting: str) -> bool:
    return setting.rpartition(".")[0] == section


def _leaves(value: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from list(_leaves(inner, f"{prefix}{name}.")) or [f"{prefix}{name}"]
