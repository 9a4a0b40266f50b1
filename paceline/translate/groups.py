"""Settings of verl that are translated together, because one depends on the other."""

import math
import os
from typing import Any

from paceline.translate.source import ACTOR, MODEL, PROGRAM, ROLLOUT, Source

VALIDATION = ("n", "temperature")
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
    if mini < 0 or source.get(f"{ACTOR}ppo_mini_batch_size") == 0:
        source.reject(f"{ACTOR}ppo_mini_batch_size", "expected a positive number")
    elif mini:
        total = groups or source.base_number("groups_per_step", 16)
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
    steps = steps or int(source.base_number("schedule.sync_every", 1))
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


def learning_rate(source: Source) -> dict[str, Any]:
    """Translate learning rate, warm-up and decay."""
    optim = f"{ACTOR}optim."
    found: dict[str, Any] = {}
    rate = source.get(f"{optim}lr")
    if rate is not None:
        found["train.learning_rate"] = rate
    warmup = source.number(f"{optim}lr_warmup_steps", default=-1)
    ratio = source.number(f"{optim}lr_warmup_steps_ratio")
    steps = source.number("trainer.total_training_steps") or source.base_number("steps", 100)
    if warmup >= 0 or ratio:
        found["train.warmup_steps"] = int(warmup if warmup >= 0 else ratio * steps)
    if warmup < 0 and ratio:
        source.note(f"{optim}lr_warmup_steps_ratio", f"counted for {steps} steps")
    names = (f"{optim}lr_scheduler_type", f"{optim}warmup_style", f"{optim}lr_decay_style")
    kind = source.get(*names)
    if kind in SCHEDULES:
        found["train.lr_schedule"] = kind
    elif kind is not None:
        name = next(name for name in names if source.get(name) is not None)
        source.reject(name, f"train.lr_schedule is one of {', '.join(SCHEDULES)}")
    return found


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
    verifiers = [name for word, name in VERIFIERS.items() if word in files]
    verifier = verifiers[0] if len(verifiers) == 1 else None
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
    given = map(source.number, ("trainer.test_freq", "rollout.test_freq"))
    every = next((number for number in given if number > 0), -1)
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
