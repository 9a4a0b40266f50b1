"""Translation of a GRPOConfig to Paceline's settings.

TRL counts completions and optimizer updates, Paceline prompts and train steps. One train step here
is one generation batch of TRL: the updates, and the completions in each, are the same in number.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from paceline.algo.settings import Advantage
from paceline.config import TRACKERS
from paceline.errors import ConfigError
from paceline.trl.config import GRPOConfig, rejected
from paceline.workers.hardware import has_fast_bfloat16

# TRL waits without a limit for slow models and slow reward functions. These limits are only for
# what hangs.
GENEROUS = {"rollout.generation_timeout": 3600.0, "step_timeout_s": 7200.0, "reward.timeout_s": 600}
NO_BOUND = 1e9  # stands for "no upper limit", where a setting needs a number
SAME_RESULT = {"dtype", "torch_dtype", "attn_implementation", "device_map", "use_cache"}
SAME_RESULT |= {"low_cpu_mem_usage"}


@dataclass(frozen=True, slots=True)
class Plan:
    """How long the run is, in units of both."""

    groups: int  # prompts per train step
    mini_batches: int  # updates per pass over the generation batch
    updates: int  # per train step, with all passes
    steps: int  # train steps
    steps_per_epoch: int

    @property
    def max_steps(self) -> int:
        """Updates of the whole run, which TRL calls steps."""
        return self.steps * self.updates


def plan(args: GRPOConfig, rows: int) -> Plan:
    """Return the sizes of a run over `rows` prompts."""
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations"):
        if getattr(args, name) < 1:
            raise ConfigError(f"{name} = {getattr(args, name)}; expected at least 1")
    accumulated, size = args.gradient_accumulation_steps, args.per_device_train_batch_size
    per_generation = _steps_per_generation(args)
    if args.num_generations < 2:
        raise ConfigError(
            f"num_generations = {args.num_generations}: GRPO compares completions of one prompt; "
            "expected at least 2"
        )
    if per_generation % accumulated == 0:
        completions, mini_batches = size * per_generation, per_generation // accumulated
    elif accumulated % per_generation == 0 and args.num_iterations == 1:
        completions, mini_batches = size * accumulated, 1
    else:
        raise ConfigError(
            f"steps_per_generation = {per_generation}, gradient_accumulation_steps = {accumulated}"
            f" and num_iterations = {args.num_iterations} do not align: updates would mix parts of "
            "generation batches; make steps_per_generation a multiple of "
            "gradient_accumulation_steps"
        )
    if completions % args.num_generations:
        raise ConfigError(
            f"num_generations = {args.num_generations} does not divide the {completions} "
            "completions of a generation batch (per_device_train_batch_size x "
            "steps_per_generation); change one of them"
        )
    groups = completions // args.num_generations
    updates = mini_batches * args.num_iterations
    steps_per_epoch = max(1, rows // groups)
    steps = (
        math.ceil(args.max_steps / updates)
        if args.max_steps > 0
        else math.ceil(args.num_train_epochs * steps_per_epoch)
    )
    return Plan(groups, mini_batches, updates, max(1, steps), steps_per_epoch)


def _steps_per_generation(args: GRPOConfig) -> int:
    size, batch = args.per_device_train_batch_size, args.generation_batch_size
    if batch is None:
        return int(args.steps_per_generation or args.gradient_accumulation_steps)
    if args.steps_per_generation is not None:
        raise ConfigError(
            "generation_batch_size and steps_per_generation are both set; remove one of them"
        )
    if batch < size or batch % size:
        raise ConfigError(
            f"generation_batch_size = {batch} is not a multiple of "
            f"per_device_train_batch_size = {size}"
        )
    return int(batch // size)


def settings(args: GRPOConfig, plan: Plan) -> dict[str, Any]:
    """Return the settings by dotted name; those of `args.paceline` win."""
    args.check()
    _check(args)
    found: dict[str, Any] = {
        **GENEROUS,
        "run_dir": args.output_dir,
        "seed": args.seed,
        "steps": plan.steps,
        "groups_per_step": plan.groups,
        "group_size": args.num_generations,
        "data.shuffle": bool(args.shuffle_dataset),
        "rollout.max_response_length": args.max_completion_length,
        "rollout.temperature": args.temperature,
        "algorithm.epochs": args.num_iterations,
        "algorithm.mini_batches": plan.mini_batches,
        **_objective(args),
        **_off_policy(args),
        **_optimizer(args, plan),
        **_checkpoints(args, plan),
        **_evaluation(args, plan),
    }
    if trackers := _trackers(args):
        found["track"] = trackers
    if args.max_prompt_length is not None:
        found["data.max_prompt_length"] = args.max_prompt_length
    custom = args.paceline.get("algorithm.advantage", "group") not in get_args(Advantage)
    if custom and found["algorithm.normalize"] == "group":
        del found["algorithm.normalize"]  # a custom advantage is used as it is
    return found | args.paceline


def _check(args: GRPOConfig) -> None:
    """Raise ConfigError for values of translated fields that have no counterpart."""
    if args.router_aux_loss_coef:
        reason = "there is no auxiliary loss of experts; use 0.0"
        raise rejected("router_aux_loss_coef", args.router_aux_loss_coef, reason)
    if not isinstance(args.model_init_kwargs or {}, Mapping):
        raise rejected("model_init_kwargs", args.model_init_kwargs, "expected a dict")
    for name in (args.model_init_kwargs or {}).keys() - SAME_RESULT:
        reason = f"{name!r} would load another model; pass the directory of that model instead"
        raise rejected("model_init_kwargs", args.model_init_kwargs, reason)


def _trackers(args: GRPOConfig) -> list[str]:
    """Return the trackers of report_to, which get Paceline's metrics."""
    given = args.report_to
    names = list(given) if isinstance(given, list | tuple) else [given or "none"]
    for name in names:
        if name not in ("none", *TRACKERS):
            known = " or ".join(map(repr, (*TRACKERS, "none")))
            reason = f"use {known}; metrics are in metrics.jsonl of output_dir in any case"
            raise rejected("report_to", given, reason)
    return [name for name in names if name != "none"]


def _objective(args: GRPOConfig) -> dict[str, Any]:
    kind, level = _one_of(args, "loss_type", LOSSES), args.importance_sampling_level
    loss, aggregation = LOSSES[kind]
    if level not in ("token", "sequence") or (level == "sequence" and loss != "clip"):
        reason = f"with loss_type = {kind!r} only 'token' is possible"
        raise rejected("importance_sampling_level", level, reason)
    scale = str(args.scale_rewards)
    scale = {"True": "group", "False": "none"}.get(scale, scale)
    if scale not in ("group", "none"):
        reason = (
            "use 'group' or 'none'; paceline={'algorithm.normalize': 'batch'} divides by the "
            "standard deviation over all tokens of the batch"
        )
        raise rejected("scale_rewards", scale, reason)
    found: dict[str, Any] = {
        "algorithm.name": "grpo",
        "algorithm.loss": "sequence_clip" if level == "sequence" else loss,
        "algorithm.aggregation": aggregation,
        "algorithm.normalize": scale,
        "algorithm.overlong": "mask" if args.mask_truncated_completions else "keep",
        "algorithm.kl_coef": args.beta,
    }
    if args.beta and args.use_bias_correction_kl:
        # TRL weights its estimate with the ratio. On fresh data the gradient is then that of k2.
        found["algorithm.kl_estimator"] = "k2"
    if args.entropy_coef:
        if aggregation != "token":
            reason = f"with loss_type = {kind!r} the bonus would not be the mean over tokens"
            raise rejected("entropy_coef", args.entropy_coef, reason)
        found["algorithm.entropy_coef"] = args.entropy_coef
    return found | _clips(args, found["algorithm.loss"])


# TRL's name: objective of a token, and the mean over tokens.
LOSSES = {
    "grpo": ("clip", "sequence"),
    "dapo": ("clip", "token"),
    "bnpo": ("clip", "token"),
    "dr_grpo": ("clip", "constant"),
    "cispo": ("cispo", "token"),
    "sapo": ("sapo", "sequence"),
}


def _clips(args: GRPOConfig, loss: str) -> dict[str, Any]:
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    if args.delta is not None and loss != "clip":
        raise rejected("delta", args.delta, "it needs a clipped loss of token ratios ('dapo')")
    if loss == "sapo":
        steepness = (args.sapo_temperature_pos, args.sapo_temperature_neg)
        return {"algorithm.sapo_temperatures": steepness}
    if loss == "cispo":
        if high < 1:
            reason = "with 'cispo' it is the upper bound of the weight, for example 5.0"
            raise rejected("epsilon_high", args.epsilon_high, reason)
        return {"algorithm.clip_low": 1.0, "algorithm.clip_high": high - 1}
    found = {"algorithm.clip_low": args.epsilon, "algorithm.clip_high": high}
    return found if args.delta is None else found | {"algorithm.dual_clip": args.delta}


def _off_policy(args: GRPOConfig) -> dict[str, Any]:
    """Return the engine and the correction of its log-probs.

    The native engine's log-probs are the trainer's, so only vLLM's are corrected.
    """
    if not args.use_vllm:
        return {}
    found: dict[str, Any] = {"rollout.engine": "vllm"}
    if not args.vllm_importance_sampling_correction:
        return found
    modes = [f"{level}_{how}" for level in ("token", "sequence") for how in ("truncate", "mask")]
    level, _, how = _one_of(args, "vllm_importance_sampling_mode", modes).partition("_")
    highest = args.vllm_importance_sampling_cap or args.vllm_importance_sampling_clip_max
    lowest = args.vllm_importance_sampling_clip_min
    return found | {
        "algorithm.correction": how,
        "algorithm.correction_level": level,
        "algorithm.correction_range": (lowest or 0.0, highest or NO_BOUND),
    }


def _evaluation(args: GRPOConfig, plan: Plan) -> dict[str, Any]:
    if _one_of(args, "eval_strategy", ("no", "steps")) == "no":
        return {}
    every = interval(args.eval_steps or args.logging_steps, plan.max_steps)
    return {
        "evaluation.every": max(1, math.ceil(every / plan.updates)),
        "evaluation.samples": args.num_generations_eval or args.num_generations,
        "evaluation.temperature": args.temperature,
        "evaluation.keep_best": False,
    }


def _optimizer(args: GRPOConfig, plan: Plan) -> dict[str, Any]:
    schedule = _one_of(args, "lr_scheduler_type", SCHEDULES)
    _one_of(args, "optim", ("adamw_torch_fused", "adamw_torch"))
    warmup = args.warmup_ratio or args.warmup_steps
    if 0 < warmup < 1:
        warmup = math.ceil(warmup * plan.max_steps)
    if schedule == "constant":
        warmup = 0
    found = {
        "train.learning_rate": args.learning_rate,
        "train.lr_schedule": SCHEDULES[schedule],
        "train.warmup_steps": math.ceil(warmup / plan.updates),
        "train.weight_decay": args.weight_decay,
        "train.betas": (args.adam_beta1, args.adam_beta2),
        "train.staleness_kl_target": 0.0,  # TRL does not have it
        "train.max_grad_norm": args.max_grad_norm or NO_BOUND,
        "train.dtype": _dtype(args),
    }
    if args.gradient_checkpointing is not None:
        found["train.gradient_checkpointing"] = args.gradient_checkpointing
    return found


def _dtype(args: GRPOConfig) -> str:
    """Return TRL's default, bfloat16, except on CPUs that compute it more slowly than float32."""
    if args.bf16 is not None:
        return "bfloat16" if args.bf16 else "float32"
    import torch

    on_gpu = torch.cuda.is_available() and not args.use_cpu
    return "bfloat16" if on_gpu or has_fast_bfloat16() else "float32"


SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}


def _checkpoints(args: GRPOConfig, plan: Plan) -> dict[str, Any]:
    """Return when checkpoints are written. There is always one at the end."""
    strategy = _one_of(args, "save_strategy", ("no", "steps", "epoch"))
    every = {"no": 0, "epoch": plan.steps_per_epoch}.get(strategy)
    if every is None:
        every = math.ceil(interval(args.save_steps, plan.max_steps) / plan.updates)
    return {"save_every": every, "keep_checkpoints": args.save_total_limit or plan.steps}


def interval(value: float, max_steps: int) -> int:
    """Return a number of updates, which may be given as a fraction of all."""
    return math.ceil(value * max_steps) if 0 < value < 1 else int(value)


def _one_of(args: GRPOConfig, name: str, known: Any) -> str:
    """Return the value of a field as text; raise ConfigError if Paceline does not have it."""
    value = getattr(args, name)
    text = str(getattr(value, "value", value))  # an enumeration of transformers, or text
    if text not in known:
        raise rejected(name, text, f"use {' or '.join(map(repr, known))}")
    return text
