"""Settings of verl that are translated together, because one depends on the other."""

import math
import os
from typing import Any

from paceline.translate.source import Source

ACTOR = "actor_rollout_ref.actor."
MODEL = "actor_rollout_ref.model."
ROLLOUT = "actor_rollout_ref.rollout."
VALIDATION = ("n", "temperature")
PROGRAM = "program"  # the module that a command starts, for example verl.trainer.main_ppo
CORRECTION = "algorithm.rollout_correction."
OVERLONG = (
    "reward_model.overlong_buffer.",
    "reward_model.reward_kwargs.overlong_buffer_cfg.",
    "custom_reward_function.overlong_buffer.",
)
ESTIMATORS = {
    "gae": "ppo",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "remax": "remax",
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++_baseline",
    "opo": "opo",
    "gpg": "pg",
}
LOSSES = {
    "vanilla": "clip",
    "gspo": "sequence_clip",
    "cispo": "cispo",
    "sapo": "sapo",
    "gpg": "pg",
}
AGGREGATIONS: dict[str, dict[str, Any]] = {
    "token-mean": {"algorithm.aggregation": "token"},
    "seq-mean-token-mean": {"algorithm.aggregation": "sequence"},
    "seq-mean-token-sum": {"algorithm.aggregation": "constant", "algorithm.constant_length": 1},
    "seq-mean-token-sum-norm": {"algorithm.aggregation": "constant"},
}
KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
SCHEDULES = ("constant", "linear", "cosine")
BACKENDS = {"fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron"}
VERIFIERS = {"gsm8k": "last_number", "math": "boxed"}  # by a word in the path of the data


def batch(source: Source) -> dict[str, Any]:
    """Translate batch sizes. All count prompts; fully async pulls mini-batches instead."""
    groups = source.number("data.train_batch_size")
    mini = source.number(f"{ACTOR}ppo_mini_batch_size")
    if not groups and mini and is_async(source):
        count = int(source.number("async_training.require_batches", default=1))
        return {"groups_per_step": int(mini) * count, "algorithm.mini_batches": count}
    found: dict[str, Any] = {"groups_per_step": int(groups)} if groups else {}
    if mini:
        total = groups or source.base("groups_per_step", 16)
        found["algorithm.mini_batches"] = max(1, math.ceil(total / mini))
        if total % mini and total > mini:
            source.note(
                f"{ACTOR}ppo_mini_batch_size",
                f"{total:g} prompts per step are divided into mini-batches of about equal size",
            )
    return found


def is_async(source: Source) -> bool:
    return source.any("async_training.") or "fully_async" in str(source.get(PROGRAM))


def placement(source: Source) -> dict[str, Any]:
    """Translate numbers of GPUs, the hybrid engine, backend and rollout engine."""
    train = _gpus(source, "trainer")
    serve = _gpus(source, "rollout")
    serve = _gpus(source, ROLLOUT.rstrip(".")) if serve is None else serve
    found: dict[str, Any] = {}
    pools = source.base("placement.actor", "main"), source.base("placement.rollout", "main")
    separate = pools[0] != pools[1]
    if "split" in str(source.get(PROGRAM)):
        found["placement.actor"] = found["placement.rollout"] = "actor_rollout_ref_pool"
        found["placement.critic"] = "critic_pool"
    elif not separate and _wants_rollout_pool(source, serve):
        found["placement.actor"], found["placement.rollout"] = "train", "rollout"
        separate = True
    backend = _backend(source, train)
    found |= {"train.backend": backend} if backend else {}
    engine = _engine(source)
    found |= {"rollout.engine": engine} if engine else {}
    size = 1  # devices of an engine
    for split in ("tensor", "pipeline") if engine == "vllm" else ():
        parts = int(source.number(f"{ROLLOUT}{split}_model_parallel_size") or 1)
        found |= {f"rollout.{split}_parallel": parts} if parts > 1 else {}
        size *= parts
    if train and "placement.critic" not in found:  # two pools share the GPUs otherwise
        found["placement.train_ranks"] = train
    found |= {"placement.rollout_workers": max(1, serve // size)} if serve else {}
    found |= {"placement.min_gpus": (train or 0) + (serve or 0)} if train or serve else {}
    if max(source.number("trainer.nnodes"), source.number("rollout.nnodes")) > 1:
        found |= {"cluster": "ray", "ray.address": "auto"}
    return found


def _gpus(source: Source, section: str) -> int | None:
    """Return the number of GPUs of a section; None if it does not say."""
    per_node, nodes = f"{section}.n_gpus_per_node", f"{section}.nnodes"
    count = source.number(nodes, default=1)
    if source.get(per_node) is None and count <= 1:
        return None
    return int(source.number(per_node, default=8) * count)


def _wants_rollout_pool(source: Source, serve: int | None) -> bool:
    if serve or source.get("actor_rollout_ref.hybrid_engine") is False or one_step_off(source):
        return True
    mode = source.get("trainer.v1.trainer_mode") == "separate_async"
    return mode or (is_async(source) and not source.base("placement.overlap", False))


def one_step_off(source: Source) -> bool:
    return "one_step_off" in str(source.get(PROGRAM))


def _backend(source: Source, ranks: int | None) -> str | None:
    name = f"{ACTOR}strategy" if source.get(f"{ACTOR}strategy") else f"{ACTOR}fsdp_config.strategy"
    strategy = source.get(name)
    if strategy is None:
        several = (ranks or 0) > 1 and source.base("train.backend", "single") == "single"
        return "fsdp" if several else None
    backend = BACKENDS.get(str(strategy))
    if backend is None:
        source.reject(name, "train.backend is single, fsdp or megatron")
    return "single" if backend == "fsdp" and ranks in (0, 1) else backend


def _engine(source: Source) -> str | None:
    engine, name = source.get(f"{ROLLOUT}name"), f"{ROLLOUT}name"
    if engine is None:
        return None
    if engine != "vllm":
        source.note(name, "the native engine generates instead (rollout.engine)")
    return "vllm" if engine == "vllm" else "native"


def schedule(source: Source) -> dict[str, Any]:
    """Translate how far generation runs ahead of training."""
    if is_async(source):
        return _fully_async(source)
    mode = source.get("trainer.v1.trainer_mode", default="sync")
    if mode != "sync":
        ahead = source.number(f"trainer.v1.{mode}.num_warmup_batches", default=1)
        return {"schedule.max_staleness": math.ceil(ahead), "schedule.on_sync": "interrupt"}
    separate = one_step_off(source) or source.get("actor_rollout_ref.hybrid_engine") is False
    if separate and source.base("schedule.max_staleness") is None:
        return {"schedule.max_staleness": 1, "schedule.on_sync": "drain"}
    return {}


def _fully_async(source: Source) -> dict[str, Any]:
    # verl bounds the number of samples that are started before a sync, Paceline the age of a
    # sample in train steps. A sample of the budget (1 + threshold) * every is trained at the latest
    # in the last step before the next sync, or as many steps later as the budget allows.
    threshold, every = "async_training.staleness_threshold", "trigger_parameter_sync_step"
    found: dict[str, Any] = {}
    steps = int(source.number(f"async_training.{every}", default=0))
    if steps:
        found["schedule.sync_every"] = steps
    steps = steps or source.base("schedule.sync_every", 1)
    if source.get(threshold) is not None or "schedule.sync_every" in found:
        ahead = source.number(threshold)
        found["schedule.max_staleness"] = steps - 1 + math.ceil(ahead * steps)
        if ahead != int(ahead) or steps > 1:
            source.note(
                threshold,
                "verl limits samples in flight, Paceline the age of a sample in train steps: "
                f"schedule.max_staleness = {found['schedule.max_staleness']}",
            )
    partial = source.get("async_training.partial_rollout")
    if partial is not None or source.base("schedule.on_sync") is None:
        found["schedule.on_sync"] = "drain" if partial is False else "interrupt"
    return found


def algorithm(source: Source) -> dict[str, Any]:
    """Translate estimator, loss and aggregation."""
    found: dict[str, Any] = {}
    for name, setting, known in (
        ("algorithm.adv_estimator", "algorithm.name", ESTIMATORS),
        (f"{ACTOR}policy_loss.loss_mode", "algorithm.loss", LOSSES),
    ):
        value = source.get(name)
        if value is not None and value not in known:
            source.reject(name, f"expected one of {', '.join(known)}")
        elif value is not None:
            found[setting] = known[value]
    preset = found.get("algorithm.name", source.base("algorithm.name", "grpo"))
    if source.get("algorithm.norm_adv_by_std_in_grpo") is False and preset == "grpo":
        found["algorithm.normalize"] = "none"
    mode = source.get(f"{ACTOR}loss_agg_mode")
    if mode is not None and mode not in AGGREGATIONS:
        source.reject(f"{ACTOR}loss_agg_mode", f"expected one of {', '.join(AGGREGATIONS)}")
    found |= AGGREGATIONS.get(mode, {})
    scale = source.get(f"{ACTOR}loss_scale_factor")
    if scale is not None and found.get("algorithm.aggregation") == "constant":
        found["algorithm.constant_length"] = scale
    return found


def clip(source: Source) -> dict[str, Any]:
    ratio = source.get(f"{ACTOR}clip_ratio")
    low, high = source.get(f"{ACTOR}clip_ratio_low"), source.get(f"{ACTOR}clip_ratio_high")
    found = {"algorithm.clip_low": ratio if low is None else low}
    found["algorithm.clip_high"] = ratio if high is None else high
    return {name: value for name, value in found.items() if value is not None}


def kl(source: Source) -> dict[str, Any]:
    """Translate the KL to the reference model: in the loss or in the reward."""
    in_loss, in_reward = f"{ACTOR}use_kl_loss", "algorithm.use_kl_in_reward"
    if source.get(in_loss) and source.get(in_reward):
        source.reject(in_reward, "Paceline has the KL in the loss or in the reward, not in both")
    if source.get(in_loss):
        kind, default = f"{ACTOR}kl_loss_type", "low_var_kl"
        coefficient, place = source.get(f"{ACTOR}kl_loss_coef", default=0.001), "loss"
    elif source.get(in_reward):
        kind, default = "algorithm.kl_penalty", "kl"
        coefficient, place = source.get("algorithm.kl_ctrl.kl_coef", default=0.001), "reward"
    else:
        for name in (f"{ACTOR}kl_loss_coef", "algorithm.kl_ctrl.kl_coef"):
            source.note(name, f"no effect in verl without {in_loss} or {in_reward} = true")
        given = source.get(in_loss, in_reward) is not None
        return {"algorithm.kl_coef": 0.0} if given and source.base("algorithm.kl_coef") else {}
    estimator = KL_ESTIMATORS.get(str(source.get(kind, default=default)).rstrip("+"))
    if estimator is None:
        source.reject(kind, f"expected one of {', '.join(KL_ESTIMATORS)}")
    found = {
        "algorithm.kl_coef": coefficient,
        "algorithm.kl_placement": place,
        "algorithm.kl_estimator": estimator or "k3",
    }
    if place == "reward" and source.get("algorithm.kl_ctrl.type") == "adaptive":
        found["algorithm.kl_target"] = source.get("algorithm.kl_ctrl.target_kl", default=0.1)
    return found


def correction(source: Source) -> dict[str, Any]:
    """Translate the off-policy correction, also in the form of older versions of verl."""
    level = source.get(f"{CORRECTION}rollout_is", "algorithm.rollout_is")
    if level is True:
        level = source.get("algorithm.rollout_is_level", default="token")
    cap = source.number(f"{ACTOR}tis_imp_ratio_cap", default=-1)
    high = source.get(f"{CORRECTION}rollout_is_threshold", "algorithm.rollout_is_threshold")
    if cap > 0 and not level:
        level, high = "token", cap
    bypass = source.get(f"{CORRECTION}bypass_mode")
    found: dict[str, Any] = {}
    if level in ("token", "sequence") and not bypass:
        masks = source.get("algorithm.rollout_is_mode") == "mask"
        found["algorithm.correction"] = "mask" if masks else "truncate"
        found["algorithm.correction_level"] = level
        low = source.number("algorithm.rollout_is_threshold_lower")
        if isinstance(high, str) and "_" in high:
            low, high = map(float, high.split("_"))
            found["algorithm.correction"] = "icepop"
        found["algorithm.correction_range"] = [low, 2.0 if high is None else high]
    elif level and not bypass:
        source.reject(f"{CORRECTION}rollout_is", "algorithm.correction_level: token or sequence")
    elif level:
        source.note(f"{CORRECTION}rollout_is", "no effect in verl with bypass_mode = true")
    recomputes = bypass is False or source.get("async_training.compute_prox_log_prob")
    if recomputes and not found:
        found = {"algorithm.proximal": "recomputed", "algorithm.correction": "none"}
    if source.get(f"{CORRECTION}rollout_rs"):
        source.reject(f"{CORRECTION}rollout_rs", "nearest: algorithm.reject_range = [low, high]")
    return found


def overlong(source: Source) -> dict[str, Any]:
    """Translate DAPO's penalty of long completions."""
    for prefix in OVERLONG:
        if source.get(f"{prefix}enable"):
            if source.number(f"{prefix}penalty_factor", default=1) != 1:
                source.reject(f"{prefix}penalty_factor", "Paceline's penalty grows to 1")
            found = {"algorithm.overlong": "penalty"}
            length = source.get(f"{prefix}len")
            return found | ({} if length is None else {"algorithm.overlong_buffer": length})
    return {}


def learning_rate(source: Source) -> dict[str, Any]:
    """Translate learning rate, warm-up and decay."""
    optim = f"{ACTOR}optim."
    found: dict[str, Any] = {}
    rate = source.get(f"{optim}lr")
    if rate is not None:
        found["train.learning_rate"] = rate
    warmup = source.number(f"{optim}lr_warmup_steps", default=-1)
    ratio = source.number(f"{optim}lr_warmup_steps_ratio")
    steps = source.get("trainer.total_training_steps", default=source.base("steps", 100))
    if warmup >= 0 or ratio:
        found["train.warmup_steps"] = int(warmup if warmup >= 0 else ratio * steps)
    if warmup < 0 and ratio:
        source.note(f"{optim}lr_warmup_steps_ratio", f"counted for {steps} steps")
    names = (f"{optim}lr_scheduler_type", f"{optim}warmup_style", f"{optim}lr_decay_style")
    kind = source.get(*names)
    if kind in SCHEDULES:
        found["train.lr_schedule"] = kind
    elif kind is not None:
        name = next(name for name in names if source.get(name) == kind)
        source.reject(name, f"train.lr_schedule is one of {', '.join(SCHEDULES)}")
    return found


def critic(source: Source) -> dict[str, Any]:
    estimator = ESTIMATORS.get(source.get("algorithm.adv_estimator"))
    if (estimator or source.base("algorithm.name")) != "ppo":
        return {}
    rate = source.get("critic.optim.lr")
    actor = source.get(f"{ACTOR}optim.lr", default=source.base("train.learning_rate", 1e-6))
    if rate is not None and rate != actor:
        source.reject("critic.optim.lr", f"train.learning_rate = {actor} is also the critic's")
    path = source.get("critic.model.path")
    model = source.get(f"{MODEL}path", default=source.base("model", "tiny"))
    if path is not None and path != model:
        source.reject("critic.model.path", f"the critic starts from model = {model}")
    value = source.get("critic.cliprange_value")
    return {} if value is None else {"algorithm.value_clip": value}


def lora(source: Source) -> dict[str, Any]:
    rank = int(source.number(f"{MODEL}lora_rank", f"{MODEL}lora.rank"))
    if rank <= 0:
        return {}
    found: dict[str, Any] = {"train.lora.rank": rank}
    alpha = source.get(f"{MODEL}lora_alpha", f"{MODEL}lora.alpha")
    found |= {} if alpha is None else {"train.lora.alpha": alpha}
    targets = source.get(f"{MODEL}target_modules", f"{MODEL}lora.target_modules")
    if targets is not None and targets != "all-linear":
        found["train.lora.targets"] = [targets] if isinstance(targets, str) else targets
    return found


def offload(source: Source) -> dict[str, Any]:
    names = [
        f"{ACTOR}{part}.{what}"
        for part in ("fsdp_config", "megatron")
        for what in ("param_offload", "optimizer_offload", "grad_offload", "offload_policy")
    ]
    given = [source.get(name) for name in names if source.get(name) is not None]
    return {"train.offload": any(given)} if given else {}


def data(source: Source) -> dict[str, Any]:
    """Translate the data files. verl's have the columns prompt, data_source and reward_model."""
    files = source.get("data.train_files")
    found: dict[str, Any] = {}
    if source.get("data.filter_overlong_prompts"):
        found["data.on_bad_row"] = "skip"
    if source.get("data.truncation", default="error") != "error":
        found["data.on_bad_row"] = "skip"
        source.note("data.truncation", "longer prompts are left out, not truncated")
    if own := _own_data(source):
        source.note("data.train_files", f"{own} is set")
        return {}
    if files is None:
        return found
    paths = [expanded(file) for file in _listed(files)]
    found["data.path"] = paths[0] if len(paths) == 1 else paths
    found["data.answer_key"] = "reward_model.ground_truth"
    return found


def _own_data(source: Source) -> str | None:
    names = ("data.task", "data.source", "data.path")
    return next((name for name in names if source.base(name)), None)


def reward(source: Source) -> dict[str, Any]:
    """Translate the reward: a reward model, a custom function, or verl's choice by data_source."""
    if source.get("reward_model.enable", "reward.reward_model.enable"):
        model = source.get("reward_model.model.path", "reward.reward_model.model_path")
        return {"reward.model": model} if model else {}
    custom = "custom_reward_function."
    path = source.get(f"{custom}path", f"reward.{custom}path")
    if path is not None:
        name = source.get(f"{custom}name", f"reward.{custom}name", default="compute_score")
        source.note(f"{custom}path", "Paceline calls reward(completion, row); see docs/verl.md")
        return {"reward.function": f"{path}:{name}"}
    if _own_data(source):
        return {}
    files = " ".join(map(str, _listed(source.get("data.train_files", default="")))).lower()
    verifier = next((v for word, v in VERIFIERS.items() if word in files), None)
    if verifier:
        source.note(
            "data.train_files",
            f"reward.function = {verifier!r} is chosen by the file's name; verl chooses by the "
            "column data_source",
        )
    elif files:
        source.note("data.train_files", "set reward.function; verl chooses it by data_source")
    return {"reward.function": verifier} if verifier else {}


def run_dir(source: Source) -> dict[str, Any]:
    given = source.get("trainer.default_local_dir")
    names = [source.get("trainer.project_name"), source.get("trainer.experiment_name")]
    named = "/".join(["runs", *(str(name) for name in names if name)])
    if given or names != [None, None]:
        return {"run_dir": expanded(given) if given else named}
    return {}


def evaluation(source: Source) -> dict[str, Any]:
    """Evaluate during training on data.val_files, if verl would."""
    every = source.number("trainer.test_freq") or source.number("rollout.test_freq") or -1
    files = source.get("data.val_files")
    if every <= 0 or not files:
        for name in ("data.val_files", "trainer.test_freq"):
            source.note(name, "evaluation needs data.val_files and a positive trainer.test_freq")
        return {}
    paths = tuple(expanded(path) for path in _listed(files))
    found: dict[str, Any] = {
        "evaluation.path": paths[0] if len(paths) == 1 else paths,
        "evaluation.every": int(every),
        "evaluation.keep_best": False,  # verl does not
    }
    if (most := source.number("data.val_max_samples")) and most > 0:
        found["evaluation.limit"] = int(most)
    for theirs, ours in zip(VALIDATION, ("samples", "temperature"), strict=True):
        if (value := source.get(f"{ROLLOUT}val_kwargs.{theirs}")) is not None:
            found[f"evaluation.{ours}"] = value
    return found


def duration(source: Source) -> dict[str, Any]:
    steps = source.get("trainer.total_training_steps")
    epochs = "trainer.total_epochs"
    if steps is not None:
        source.note(epochs, "trainer.total_training_steps is set")
        return {"steps": steps}
    source.note(epochs, "set steps = epochs x rows / groups_per_step; Paceline counts steps")
    total, mini = source.number("rollout.total_rollout_steps"), batch(source)
    if total and mini.get("groups_per_step"):
        return {"steps": max(1, int(total / mini["groups_per_step"]))}
    return {}


def expanded(path: Any) -> str:
    return os.path.expandvars(os.path.expanduser(str(path)))


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
