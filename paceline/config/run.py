"""The settings of a run of reinforcement learning, combined.

Each component declares its settings; this file combines them and checks rules that concern several
of them.
"""

import logging
from collections.abc import Mapping
from typing import Any

from pydantic import AliasChoices, Field, model_validator

from paceline.algo.settings import AlgorithmSettings
from paceline.config.base import RunSettings
from paceline.data.held_out import EvaluationSettings
from paceline.data.prompts import DataSettings
from paceline.errors import ConfigError
from paceline.placement import PlacementSettings, RaySettings
from paceline.queue.message_queue import QueueSettings
from paceline.reward.reward import RewardSettings
from paceline.rollout.fleet import FleetSettings
from paceline.rollout.settings import RolloutSettings
from paceline.schedule import ScheduleSettings
from paceline.sync.settings import MISMATCH_LIMITS, SyncSettings
from paceline.training.settings import TrainSettings
from paceline.types import Role

log = logging.getLogger(__name__)


class RunConfig(RunSettings):
    steps: int = Field(100, ge=1, validation_alias=AliasChoices("steps", "total_training_steps"))
    """Number of train steps."""
    groups_per_step: int = Field(
        16, ge=1, validation_alias=AliasChoices("groups_per_step", "train_batch_size")
    )
    """Prompts per train step."""
    group_size: int = Field(8, ge=1)
    """Completions per prompt."""
    save_samples: int = Field(1, ge=0)
    """Number of prompts per step whose completions and rewards are saved to samples.jsonl. 0: none.
    """
    save_in_flight: bool = True
    """Whether checkpoints contain the groups in flight: those that wait for training, and the
    tokens of unfinished ones. A resumed run continues them; otherwise it generates them again, as
    with schedule.max_staleness = 0, where a resumed run is bit-identical to an uninterrupted one.
    """
    trace: bool = False
    """Record what each worker and each group does to trace.jsonl, see `paceline trace`."""
    profile_steps: str | None = Field(None, pattern=r"^[1-9]\d*:[1-9]\d*$")
    """Train steps, for example "10:12", of which each worker writes a torch profile to profile/ in
    the run directory. Profiled steps are slower."""
    prediction: str | None = None
    """File of `paceline plan --probe` with the predicted speed. The run compares its speed with it,
    and reports what differs if it is off by more than 20 %."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Maximum seconds for each stage of the start: loading models, loading the checkpoint,
    connecting trainer and engines, the first weight sync."""
    stall_timeout_s: float = Field(300.0, gt=0)
    """Maximum seconds without a new token, group or train step, or with a blocked event loop,
    before the run fails. Tokens alone count for rollout.episode_timeout_s, if that is longer."""

    data: DataSettings = DataSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    reward: RewardSettings = RewardSettings()
    rollout: RolloutSettings = RolloutSettings()
    fleet: FleetSettings = FleetSettings()
    queue: QueueSettings = QueueSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    train: TrainSettings = TrainSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    sync: SyncSettings = SyncSettings()
    placement: PlacementSettings = PlacementSettings()
    ray: RaySettings = RaySettings()

    @model_validator(mode="before")
    @classmethod
    def _correct_fp8(cls, data: Any) -> Any:
        """Correct the difference between an engine with FP8 and the trainer, by default."""
        if not isinstance(data, Mapping):
            return data
        algorithm = data.get("algorithm", {})
        if isinstance(algorithm, Mapping) and _has_fp8(data.get("rollout")):
            chosen = "correction" in algorithm or "proximal" in algorithm
            algorithm = algorithm if chosen else {**algorithm, "correction": "truncate"}
            return {**data, "algorithm": algorithm}
        return data

    @model_validator(mode="after")
    def _groups_are_consistent(self) -> "RunConfig":
        if self.max_queue_size < self.groups_per_step:
            raise ValueError(
                f"queue.max_queue_size = {self.queue.max_queue_size} contradicts groups_per_step = "
                f"{self.groups_per_step}: a queue smaller than one batch never fills one; "
                f"set max_queue_size to at least {self.groups_per_step}"
            )
        if self.group_size == 1 and self.algorithm.compares_completions:
            raise ValueError(
                f"group_size = 1 contradicts algorithm.name = {self.algorithm.name!r}, which "
                "compares completions of one prompt: a single one has advantage 0; "
                "set group_size to 2 or more, or algorithm.name = 'ppo'"
            )
        if self.group_size == 1 and self.algorithm.dynamic_sampling:
            raise ValueError(
                "group_size = 1 contradicts algorithm.dynamic_sampling = true: a group of one "
                "always has equal rewards, so every group would be filtered out; set group_size to "
                "2 or more, or dynamic_sampling = false"
            )
        if (least := self.rollout.min_group_size) is not None and least > self.group_size:
            raise ValueError(
                f"rollout.min_group_size = {least} contradicts group_size = {self.group_size}: "
                "it must not be larger"
            )
        heartbeat, limit = self.fleet.heartbeat_timeout_s, self.rollout.generation_timeout
        if heartbeat is not None and heartbeat >= limit:
            raise ValueError(
                f"fleet.heartbeat_timeout_s = {heartbeat:g} contradicts "
                f"rollout.generation_timeout = {limit:g}: generation would time out before the "
                "unresponsive worker is detected; lower it, or remove it"
            )
        return self

    @model_validator(mode="after")
    def _there_is_something_to_learn(self) -> "RunConfig":
        algorithm = self.algorithm
        if algorithm.teacher is None and not algorithm.uses_rewards:
            raise ValueError(
                f"algorithm.name = {algorithm.name!r} learns from a teacher alone, and there is "
                "none; set algorithm.teacher to a model with the tokenizer of the policy"
            )
        return self

    @model_validator(mode="after")
    def _ranks_are_consistent(self) -> "RunConfig":
        ranks, backend = self.placement.train_ranks, self.train.backend
        parts = self.train.tensor_parallel * self.train.pipeline_parallel
        if ranks is not None and ranks > 1 and backend == "single":
            raise ValueError(
                f"placement.train_ranks = {ranks} contradicts train.backend = 'single', which is "
                "one process; use 'fsdp' or 'megatron'"
            )
        if self.placement.overlap and backend != "single":
            raise ValueError(
                f"placement.overlap = true contradicts train.backend = {backend!r}: it is for one "
                "device; give rollout a separate pool instead"
            )
        if ranks is not None and ranks % parts:
            raise ValueError(
                f"placement.train_ranks = {ranks} contradicts train.tensor_parallel x "
                f"train.pipeline_parallel = {parts}: a model needs that many ranks; "
                f"set train_ranks to a multiple of {parts}"
            )
        size, name = self.rollout.ranks, "rollout.tensor_parallel"
        name += " x rollout.pipeline_parallel" if self.rollout.pipeline_parallel > 1 else ""
        if self.placement.shared(Role.ACTOR, Role.ROLLOUT):
            if self.rollout.engine == "vllm" and self.placement.overlap:
                raise ValueError(
                    "rollout.engine = 'vllm' in the trainer's pool contradicts placement.overlap = "
                    "true: vLLM can only alternate with a trainer; give rollout a separate pool"
                )
            if size > 1 and (backend == "single" or (ranks and ranks % size)):
                raise ValueError(
                    f"{name} = {size} in the trainer's pool contradicts "
                    f"train.backend = {backend!r} with placement.train_ranks = {ranks}: the ranks "
                    f"of the trainer are divided into engines of {size}; set train.backend = "
                    f"'fsdp' and train_ranks to a multiple of {size}, or give rollout a separate "
                    "pool"
                )
        elif size > 1 and any(
            self.placement.shared(Role.ROLLOUT, role) for role in (Role.CRITIC, Role.REF)
        ):
            raise ValueError(
                f"{name} = {size} contradicts placement.rollout = "
                f"{self.placement.rollout!r} with critic or reference model but without the actor; "
                "give rollout a separate pool"
            )
        return self

    @model_validator(mode="after")
    def _pools_have_roles(self) -> "RunConfig":
        critic = "use an algorithm with a critic (algorithm.name = 'ppo')"
        for role, used, how in (
            (Role.CRITIC, self.algorithm.needs_critic, critic),
            (Role.REF, self.algorithm.needs_reference, "set algorithm.kl_coef above 0"),
            (Role.REWARD, self.reward.model is not None, "set reward.model"),
        ):
            pool = getattr(self.placement, role.value)
            known = (None, self.placement.actor, self.placement.rollout)
            if not used and pool not in known:
                raise ValueError(
                    f"placement.{role.value} = {pool!r} would stay empty, because this run has no "
                    f"{role.value} model; {how}, or remove the setting (if the recipe has it: "
                    f"placement.{role.value}={self.placement.actor})"
                )
        return self

    @model_validator(mode="after")
    def _shared_weights_sync_every_step(self) -> "RunConfig":
        if self.schedule.sync_every > 1 and self.shares_weights:
            raise ValueError(
                f"schedule.sync_every = {self.schedule.sync_every} contradicts placement.rollout = "
                f"placement.actor = {self.placement.actor!r}: in a shared pool the engine reads "
                f"the trainer's parameters in place, so it has new weights after every step; set "
                f"sync_every = 1, set placement.overlap = true, or give rollout a separate pool"
            )
        if self.schedule.sync_every > 1 and self.releases_engines:
            raise ValueError(
                f"schedule.sync_every = {self.schedule.sync_every} contradicts train.offload = "
                "true in a shared pool: the engines free their weights during every train step "
                "and get new ones at a sync; set sync_every = 1 or offload = false, or give "
                "rollout a separate pool"
            )
        return self

    @model_validator(mode="after")
    def _profiled_steps_are_in_order(self) -> "RunConfig":
        if self.profile_steps and not self.profiled:
            raise ValueError(
                f"profile_steps = {self.profile_steps!r}: the last step comes before the first; "
                'expected FIRST:LAST, for example "10:12"'
            )
        return self

    @property
    def profiled(self) -> range:
        """The train steps that are profiled."""
        first, _, last = (self.profile_steps or "1:0").partition(":")
        return range(int(first), int(last) + 1)

    @property
    def mismatch_limit(self) -> float:
        kind = "fp8" if self.rollout.has_fp8 else self.train.dtype
        return self.sync.mismatch_limit or MISMATCH_LIMITS[kind]

    @property
    def in_place(self) -> bool:
        """Whether engine and trainer share a process, so that no weights are transferred."""
        return self.train.backend == "single" and self.placement.shared(Role.ACTOR, Role.ROLLOUT)

    @property
    def takes_turns(self) -> bool:
        """Whether engines and trainer alternate on the same devices."""
        return self.placement.shared(Role.ACTOR, Role.ROLLOUT) and not self.placement.overlap

    @property
    def releases_engines(self) -> bool:
        """Whether engines free their weights during a train step, until the next sync."""
        return self.takes_turns and self.train.offload and self.train.backend != "single"

    @property
    def shares_weights(self) -> bool:
        """Whether the engine computes with the trainer's parameters, which every step changes."""
        fp8 = self.rollout.weight_dtype == "fp8"
        copies = self.placement.overlap or self.train.lora is not None or fp8
        return self.in_place and not copies and self.rollout.engine == "native"

    @property
    def heartbeat_timeout_s(self) -> float:
        default = min(30.0, max(5.0, self.rollout.generation_timeout / 2))
        return self.fleet.heartbeat_timeout_s or default

    @property
    def slots(self) -> int:
        """Slots of each engine: at most as many as completions can be in flight."""
        completions = self.group_size + self.algorithm.needs_greedy_baseline
        return min(self.rollout.slots, self.schedule.capacity(self.groups_per_step) * completions)

    @property
    def keeps_in_flight(self) -> bool:
        """Whether checkpoints contain groups in flight.

        A continued completion has the same tokens, but its log-probs may differ in the last bit.
        """
        return self.save_in_flight and self.schedule.max_staleness > 0

    @property
    def max_queue_size(self) -> int:
        return self.queue.max_queue_size or self.schedule.capacity(self.groups_per_step)


# Settings that a resumed run may change: they do not change what is learned. They say how long, on
# what hardware and how it is observed, or fix what ended the run (too little memory, time or
# workers). Data may move; its content is compared.
MAY_CHANGE = {
    *("save_every_s", "save_in_flight", "grace_s"),
    *("run_dir", "steps", "save_every", "keep_checkpoints", "save_samples", "track", "trace"),
    *("prediction", "profile_steps"),
    "start_timeout_s",
    *("step_timeout_s", "stall_timeout_s", "sync", "fleet", "cluster", "ray", "data.path"),
    "evaluation",
    *("train.backend", "train.tensor_parallel", "train.pipeline_parallel", "train.offload"),
    *("train.micro_batch_tokens", "train.gradient_checkpointing"),
    "train.max_skipped_updates",
    *("placement.train_ranks", "placement.rollout_workers", "placement.threads"),
    "placement.min_gpus",
    *("rollout.slots", "rollout.kv_memory_fraction", "rollout.generation_timeout"),
    "rollout.episode_timeout_s",
    *("rollout.environment_workers", "rollout.environment_pass_env"),
    *("rollout.tensor_parallel", "rollout.pipeline_parallel", "rollout.max_failed_groups"),
    *("reward.timeout_s", "reward.workers"),
    *("reward.pass_env", "reward.allow_weak_sandbox"),
    *("reward.judge.base_url", "reward.judge.api_key_env", "reward.judge.concurrency"),
    *("reward.judge.timeout_s", "reward.judge.retries"),
    *("epochs", "validation.path", "validation.every"),  # of supervised runs
}


def differences(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the settings that differ between two configurations and must not change."""
    found = []
    for key in sorted(before.keys() | now.keys()):
        if f"{prefix}{key}" in MAY_CHANGE:
            continue
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += differences(old, new, f"{prefix}{key}.")
        elif old != new:
            found.append(f"{prefix}{key}: was {old!r}, is now {new!r}")
    return found


def _has_fp8(rollout: Any) -> bool:
    if isinstance(rollout, Mapping):
        return "fp8" in (rollout.get("kv_cache_dtype"), rollout.get("weight_dtype"))
    return isinstance(rollout, RolloutSettings) and rollout.has_fp8


def check_trainable(config: RunConfig) -> None:
    """Raise ConfigError for settings that are valid only for evaluation."""
    rollout = config.rollout
    if rollout.has_fp8 and config.algorithm.correction == "none":
        log.warning(
            "algorithm.correction = 'none' with FP8 in the rollout engine: the probabilities of "
            "the engine differ from the trainer's, and nothing bounds their ratio. Set "
            "algorithm.correction = 'truncate'"
        )
    if rollout.temperature == 0:
        raise ConfigError(
            "rollout.temperature = 0: greedy completions of a prompt are all equal, so training "
            "learns nothing from them; expected a temperature above 0"
        )
    if rollout.top_p < 1 or rollout.top_k > 0:
        raise ConfigError(
            f"rollout.top_p = {rollout.top_p:g}, rollout.top_k = {rollout.top_k}: the trainer "
            f"computes log-probs over the whole vocabulary, so training on completions sampled "
            f"from a part of it would use wrong ratios; train with top_p = 1 and top_k = 0"
        )
    if config.algorithm.teacher == config.model:
        raise ConfigError(
            f"algorithm.teacher = {config.model!r} is the policy itself; set it to another model, "
            "or remove it to use the initial policy as the reference"
        )
