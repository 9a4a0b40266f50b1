"""The table of verl's settings: what each name becomes in Paceline, and verl's own defaults."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from paceline.translate import algorithm_groups, groups
from paceline.translate.algorithm_groups import CORRECTION
from paceline.translate.source import ACTOR, MODEL, PROGRAM, ROLLOUT, Source


@dataclass(frozen=True, slots=True)
class Same:
    """One setting of Paceline, with the same or a converted value."""

    setting: str
    convert: Callable[[Any], Any] = lambda value: value
    note: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """A setting that is translated together with others."""

    group: Callable[[Source], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Ignored:
    """A setting that does not change what is learned."""

    reason: str


@dataclass(frozen=True, slots=True)
class Missing:
    """A setting that changes what is learned, unless it has one of the values `off`."""

    reason: str
    off: tuple[Any, ...] = ()


Entry = Same | Part | Ignored | Missing
OFF: tuple[Any, ...] = (None, False, "", "null", "???", [], {})  # in addition to an entry's values
MEMORY = Ignored("memory and speed only; nearest: train.micro_batch_tokens")
ALWAYS = Ignored("Paceline always does this")
UNNEEDED = Ignored("Paceline has no use for it")
EVALUATE = Ignored("samples of training are in RUN_DIR/samples.jsonl; evaluations are not saved")
PARALLEL = Ignored("memory and speed only; nearest: placement.rollout_workers, one GPU each")
AS_ACTOR = Ignored("follows the actor's settings")
ENVIRONMENT = Missing("nearest: a custom agent loop, rollout.environment")
METRICS = Ignored("metrics are in RUN_DIR/metrics.jsonl")


def _capped(value: Any) -> Any:
    """Return 0, Paceline's value for "off", for -1."""
    return max(0, value) if isinstance(value, int) else value


def _limit(value: Any) -> Any:
    return None if value == -1 else value


# Names that end with ".*" are all names below. The most specific entry counts.
TABLE: dict[str, Entry] = {
    # data
    "data.train_files": Part(groups.data),
    "data.val_files": Part(groups.evaluation),
    "data.val_batch_size": Ignored("the engines take as many prompts as they have slots"),
    "data.val_max_samples": Part(groups.evaluation),
    "data.validation_shuffle": Ignored("every row is evaluated once"),
    "data.train_batch_size": Part(groups.batch),
    "data.gen_batch_size": Ignored("prompts are issued one by one"),
    "data.max_response_length": Same("rollout.max_response_length"),
    "data.seed": Same("seed"),
    "data.truncation": Part(groups.data),
    "data.filter_overlong_prompts": Part(groups.data),
    "data.train_max_samples": Same("data.limit", _limit),
    "data.reward_fn_key": Ignored("the reward function gets the whole row"),
    "data.tokenizer": Missing("the tokenizer is the model's"),
    "data.apply_chat_template_kwargs.*": Missing("nearest: data.chat, data.system"),
    "data.custom_cls.path": Missing("nearest: data.path with other files, data.curriculum"),
    "data.sampler.class_path": Missing("nearest: data.curriculum"),
    **dict.fromkeys(
        (
            *("data.filter_overlong_prompts_workers", "data.return_raw_input_ids", "data.use_shm"),
            *("data.return_raw_chat", "data.return_full_prompt", "data.trust_remote_code"),
            *("data.image_key", "data.video_key", "data.return_multi_modal_inputs"),
            *("data.dataloader_num_workers", "data.custom_cls.*", "data.sampler.*"),
            *("data.datagen.*", "data.filter_prompts", "data.shuffle_train_dataloader"),
            *("data.apply_chat_template", "data.tool_config_path", "data.mcp_config_path"),
        ),
        UNNEEDED,
    ),
    # model
    f"{MODEL}path": Same("model", groups.expanded),
    f"{MODEL}enable_gradient_checkpointing": Same("train.gradient_checkpointing"),
    f"{MODEL}enable_activation_offload": MEMORY,
    f"{MODEL}use_remove_padding": ALWAYS,
    f"{MODEL}lora_rank": Part(groups.lora),
    f"{MODEL}lora_alpha": Part(groups.lora),
    f"{MODEL}target_modules": Part(groups.lora),
    f"{MODEL}lora.rank": Part(groups.lora),
    f"{MODEL}lora.alpha": Part(groups.lora),
    f"{MODEL}lora.target_modules": Part(groups.lora),
    f"{MODEL}exclude_modules": Missing("nearest: train.lora.targets"),
    f"{MODEL}custom_chat_template": Missing("the chat template is the tokenizer's"),
    f"{MODEL}tokenizer_path": Missing("the tokenizer is the model's"),
    f"{MODEL}override_config.attn_implementation": UNNEEDED,
    f"{MODEL}override_config.*": Missing("the configuration is the model's config.json"),
    f"{MODEL}*": UNNEEDED,
    # actor
    f"{ACTOR}strategy": Part(groups.placement),
    f"{ACTOR}ppo_mini_batch_size": Part(groups.batch),
    f"{ACTOR}ppo_micro_batch_size": MEMORY,
    f"{ACTOR}ppo_micro_batch_size_per_gpu": MEMORY,
    f"{ACTOR}ppo_infer_max_token_len_per_gpu": MEMORY,
    f"{ACTOR}ppo_epochs": Same("algorithm.epochs"),
    f"{ACTOR}ppo_max_token_len_per_gpu": Same("train.micro_batch_tokens"),
    f"{ACTOR}grad_clip": Same("train.max_grad_norm"),
    f"{ACTOR}clip_ratio": Part(algorithm_groups.clip),
    f"{ACTOR}clip_ratio_low": Part(algorithm_groups.clip),
    f"{ACTOR}clip_ratio_high": Part(algorithm_groups.clip),
    f"{ACTOR}clip_ratio_c": Same("algorithm.dual_clip"),
    f"{ACTOR}loss_agg_mode": Part(algorithm_groups.algorithm),
    f"{ACTOR}loss_scale_factor": Part(algorithm_groups.algorithm),
    f"{ACTOR}policy_loss.loss_mode": Part(algorithm_groups.algorithm),
    f"{ACTOR}entropy_coeff": Same("algorithm.entropy_coef"),
    f"{ACTOR}use_kl_loss": Part(algorithm_groups.kl),
    f"{ACTOR}kl_loss_coef": Part(algorithm_groups.kl),
    f"{ACTOR}kl_loss_type": Part(algorithm_groups.kl),
    f"{ACTOR}tis_imp_ratio_cap": Part(algorithm_groups.correction),
    f"{ACTOR}optim.lr": Part(groups.learning_rate),
    f"{ACTOR}optim.lr_warmup_steps": Part(groups.learning_rate),
    f"{ACTOR}optim.lr_warmup_steps_ratio": Part(groups.learning_rate),
    f"{ACTOR}optim.lr_scheduler_type": Part(groups.learning_rate),
    f"{ACTOR}optim.warmup_style": Part(groups.learning_rate),
    f"{ACTOR}optim.lr_decay_style": Part(groups.learning_rate),
    f"{ACTOR}optim.weight_decay": Same("train.weight_decay"),
    f"{ACTOR}optim.betas": Same("train.betas"),
    f"{ACTOR}optim.clip_grad": Same("train.max_grad_norm"),
    f"{ACTOR}optim.min_lr_ratio": Missing("the learning rate decays to 0", (0, 0.0)),
    f"{ACTOR}optim.optimizer": Missing("the optimizer is AdamW", ("adam", "AdamW", "adamw")),
    f"{ACTOR}optim.*": UNNEEDED,
    f"{ACTOR}fsdp_config.strategy": Part(groups.placement),
    f"{ACTOR}fsdp_config.dtype": Same("train.dtype"),
    **{
        f"{ACTOR}{part}.{name}": Part(groups.offload)
        for part in ("fsdp_config", "megatron")
        for name in ("param_offload", "optimizer_offload", "grad_offload", "offload_policy")
    },
    f"{ACTOR}fsdp_config.*": MEMORY,
    f"{ACTOR}megatron.tensor_model_parallel_size": Same("train.tensor_parallel"),
    f"{ACTOR}megatron.pipeline_model_parallel_size": Same("train.pipeline_parallel"),
    f"{ACTOR}megatron.*": MEMORY,
    f"{ACTOR}use_dynamic_bsz": MEMORY,
    f"{ACTOR}ulysses_sequence_parallel_size": MEMORY,
    f"{ACTOR}use_token_level_loss": Same(
        "algorithm.aggregation", lambda value: "token" if value else "sequence"
    ),
    f"{ACTOR}*": UNNEEDED,
    # rollout
    f"{ROLLOUT}name": Part(groups.placement),
    f"{ROLLOUT}n": Same("group_size"),
    f"{ROLLOUT}temperature": Same("rollout.temperature"),
    f"{ROLLOUT}top_p": Same("rollout.top_p"),
    f"{ROLLOUT}top_k": Same("rollout.top_k", _capped),
    f"{ROLLOUT}response_length": Same("rollout.max_response_length"),
    f"{ROLLOUT}gpu_memory_utilization": Same(
        "rollout.kv_memory_fraction", note="Paceline's fraction is that of the KV cache alone"
    ),
    f"{ROLLOUT}max_num_seqs": Same("rollout.slots"),
    f"{ROLLOUT}enforce_eager": Same("rollout.vllm.eager"),
    f"{ROLLOUT}nnodes": Part(groups.placement),
    f"{ROLLOUT}n_gpus_per_node": Part(groups.placement),
    f"{ROLLOUT}do_sample": Missing("set rollout.temperature", (True,)),
    f"{ROLLOUT}ignore_eos": Missing("completions end at an end token"),
    f"{ROLLOUT}multi_turn.enable": ENVIRONMENT,
    f"{ROLLOUT}agent.agent_loop_config_path": ENVIRONMENT,
    f"{ROLLOUT}agent.default_agent_loop": Missing(ENVIRONMENT.reason, ("single_turn_agent",)),
    **{f"{ROLLOUT}val_kwargs.{name}": Part(groups.evaluation) for name in groups.VALIDATION},
    f"{ROLLOUT}val_kwargs.*": Ignored("as in training"),
    **{f"{ROLLOUT}{name}_parallel_size": PARALLEL for name in ("data", "expert", "expert_tensor")},
    f"{ROLLOUT}pipeline_model_parallel_size": Part(groups.placement),
    f"{ROLLOUT}tensor_model_parallel_size": Part(groups.placement),
    f"{ROLLOUT}*": UNNEEDED,
    "actor_rollout_ref.ref.*": AS_ACTOR,
    "actor_rollout_ref.hybrid_engine": Part(groups.placement),
    "actor_rollout_ref.*": UNNEEDED,
    # critic and reward
    "critic.optim.lr": Part(algorithm_groups.critic),
    "critic.model.path": Part(algorithm_groups.critic),
    "critic.cliprange_value": Part(algorithm_groups.critic),
    "critic.*": AS_ACTOR,
    "reward_model.enable": Part(groups.reward),
    "reward_model.model.path": Part(groups.reward),
    "reward_model.reward_manager": Missing("nearest: reward.function", ("naive", "dapo")),
    "reward_model.sandbox_fusion.url": Missing("nearest: a custom reward.function"),
    **{
        f"{prefix}{name}": Part(algorithm_groups.overlong)
        for prefix in algorithm_groups.OVERLONG
        for name in ("enable", "len", "penalty_factor")
    },
    "reward_model.*": UNNEEDED,
    "reward.reward_model.enable": Part(groups.reward),
    "reward.reward_model.model_path": Part(groups.reward),
    "reward.reward_manager.name": Missing("nearest: reward.function", ("naive", "dapo")),
    "reward.custom_reward_function.path": Part(groups.reward),
    "reward.custom_reward_function.name": Part(groups.reward),
    "reward.num_workers": Same("reward.workers"),
    "reward.sandbox_fusion.url": Missing("nearest: a custom reward.function"),
    "reward.custom_reward_function.reward_kwargs.*": Missing("nearest: defaults of the function"),
    # Not "reward.*": Paceline has a section of this name, and a typo there must be an error.
    **dict.fromkeys(
        (
            *("reward.reward_model.*", "reward.reward_manager.*", "reward.reward_loop.*"),
            *(
                "reward.sandbox_fusion.*",
                "reward.custom_reward_function.*",
                "reward.reward_kwargs.*",
            ),
        ),
        UNNEEDED,
    ),
    "custom_reward_function.path": Part(groups.reward),
    "custom_reward_function.name": Part(groups.reward),
    "custom_reward_function.reward_kwargs.*": Missing("nearest: defaults of the function"),
    # algorithm
    "algorithm.adv_estimator": Part(algorithm_groups.algorithm),
    "algorithm.norm_adv_by_std_in_grpo": Part(algorithm_groups.algorithm),
    "algorithm.use_kl_in_reward": Part(algorithm_groups.kl),
    "algorithm.kl_penalty": Part(algorithm_groups.kl),
    "algorithm.kl_ctrl.kl_coef": Part(algorithm_groups.kl),
    "algorithm.kl_ctrl.type": Part(algorithm_groups.kl),
    "algorithm.kl_ctrl.target_kl": Part(algorithm_groups.kl),
    "algorithm.kl_ctrl.horizon": Ignored("nearest: algorithm.kl_target"),
    "algorithm.filter_groups.enable": Same("algorithm.dynamic_sampling"),
    "algorithm.filter_groups.*": UNNEEDED,
    "algorithm.use_pf_ppo": Missing("nearest: algorithm.dynamic_sampling"),
    "algorithm.pf_ppo.*": UNNEEDED,
    **dict.fromkeys(
        (
            *("algorithm.rollout_is", "algorithm.rollout_is_level", "algorithm.rollout_is_mode"),
            *("algorithm.rollout_is_threshold", "algorithm.rollout_is_threshold_lower"),
            *(f"{CORRECTION}rollout_is", f"{CORRECTION}rollout_is_threshold"),
            *(f"{CORRECTION}bypass_mode", f"{CORRECTION}rollout_rs"),
            "async_training.compute_prox_log_prob",
        ),
        Part(algorithm_groups.correction),
    ),
    "algorithm.rollout_is_veto_threshold": Missing("nearest: algorithm.reject_range"),
    f"{CORRECTION}rollout_is_batch_normalize": Missing("weights are not normalized"),
    f"{CORRECTION}*": UNNEEDED,
    # trainer
    "trainer.total_training_steps": Part(groups.duration),
    "trainer.total_epochs": Part(groups.duration),
    "trainer.n_gpus_per_node": Part(groups.placement),
    "trainer.nnodes": Part(groups.placement),
    "trainer.save_freq": Same("save_every", _capped),
    "trainer.max_actor_ckpt_to_keep": Same("keep_checkpoints"),
    "trainer.max_critic_ckpt_to_keep": UNNEEDED,
    "trainer.critic_warmup": Same("algorithm.critic_warmup"),
    "trainer.default_local_dir": Part(groups.run_dir),
    "trainer.project_name": Part(groups.run_dir),
    "trainer.experiment_name": Part(groups.run_dir),
    "trainer.logger": METRICS,
    "trainer.val_before_train": Ignored("the first version is always evaluated"),
    "trainer.test_freq": Part(groups.evaluation),
    "trainer.log_val_generations": EVALUATE,
    "trainer.validation_data_dir": EVALUATE,
    "trainer.rollout_data_dir": Ignored("samples are in RUN_DIR/samples.jsonl (save_samples)"),
    "trainer.val_only": Missing("use `paceline evaluate`"),
    "trainer.resume_mode": Ignored("a run is resumed unless --fresh is given"),
    "trainer.resume_from_path": Missing("set run_dir to the run, or model to its checkpoint"),
    "trainer.device": Missing("Paceline runs on CUDA devices and CPUs", ("cuda", "cpu")),
    "trainer.v1.trainer_mode": Part(groups.schedule),
    "trainer.v1.colocate_async.num_warmup_batches": Part(groups.schedule),
    "trainer.v1.separate_async.num_warmup_batches": Part(groups.schedule),
    "trainer.v1.sampler.max_off_policy_threshold": Ignored("nearest: schedule.max_staleness"),
    "trainer.*": UNNEEDED,
    # asynchronous training
    "async_training.staleness_threshold": Part(groups.schedule),
    "async_training.trigger_parameter_sync_step": Part(groups.schedule),
    "async_training.partial_rollout": Part(groups.schedule),
    "async_training.require_batches": Part(groups.batch),
    "async_training.max_queue_size": Same("queue.max_queue_size"),
    "async_training.generation_timeout": Same("rollout.generation_timeout"),
    "async_training.concurrent_samples_per_replica": Ignored("nearest: rollout.slots"),
    "async_training.*": UNNEEDED,
    "rollout.n_gpus_per_node": Part(groups.placement),
    "rollout.nnodes": Part(groups.placement),
    "rollout.total_rollout_steps": Part(groups.duration),
    "rollout.n": Ignored(f"verl reads {ROLLOUT}n"),
    "rollout.total_epochs": Ignored("Paceline counts steps"),
    "rollout.test_freq": Part(groups.evaluation),
    # other sections
    PROGRAM: Part(groups.placement),
    **dict.fromkeys(
        (
            *("ray_kwargs.*", "ray_init.*", "global_profiler.*", "transfer_queue.*", "hydra.*"),
            *("defaults", "profiler.*", "model_engine", "actor_config.*"),
        ),
        UNNEEDED,
    ),
    **dict.fromkeys(
        ("--config-name", "--config-path", "--config-dir"),
        Ignored("the file is not read; give it to `paceline translate` before the overrides"),
    ),
}
SHARED = {"data", "rollout", "algorithm", "reward"}  # sections that both have
SECTIONS = {name.split(".")[0] for name in TABLE} - SHARED - {PROGRAM}
GROUPS = tuple(dict.fromkeys(entry.group for entry in TABLE.values() if isinstance(entry, Part)))

# Defaults of verl that differ from Paceline's and change what is learned. They complete a
# configuration of verl, which has an estimator.
DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 1024,
    "data.max_response_length": 512,
    f"{ACTOR}ppo_mini_batch_size": 256,
    f"{ACTOR}loss_agg_mode": "token-mean",
    f"{ACTOR}clip_ratio_c": 3.0,
    f"{ACTOR}optim.weight_decay": 0.01,
    f"{ACTOR}optim.betas": [0.9, 0.999],
    f"{ACTOR}fsdp_config.dtype": "bfloat16",
    f"{ROLLOUT}n": 1,
    "critic.cliprange_value": 0.5,
}

# Settings that verl does not have, with the values that learn as verl does.
OWN: dict[str, Any] = {"train.staleness_kl_target": 0.0}


def find_entry(name: str) -> Entry | None:
    """Return the entry of a name of verl, or of the most specific pattern for it."""
    if name in TABLE:
        return TABLE[name]
    parts = name.split(".")
    patterns = (".".join([*parts[:end], "*"]) for end in range(len(parts), 0, -1))
    entry = next((TABLE[pattern] for pattern in patterns if pattern in TABLE), None)
    meant = _similar_name(parts)
    return Missing(f"did you mean {meant!r}?") if entry and meant else entry


def _similar_name(parts: Sequence[str]) -> str | None:
    """Return the known name that differs in the first unknown part, if that part is similar."""
    for end, part in enumerate(parts):
        before = tuple(parts[:end])
        siblings = {name[end] for name in _names() if name[:end] == before and len(name) > end}
        if part not in siblings:
            close = difflib.get_close_matches(part, siblings - {"*"}, n=1, cutoff=0.88)
            return ".".join([*parts[:end], *close, *parts[end + 1 :]]) if close else None
    return None


@cache
def _names() -> list[tuple[str, ...]]:
    return [tuple(name.split(".")) for name in TABLE]
