"""All settings of a run: a recipe plus `key=value` overrides, checked before anything starts.

Each component declares its settings; this file combines them, checks rules that concern several of
them, and translates settings of verl.
"""

import functools
import json
import logging
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import AliasChoices, Field, ValidationError, field_validator, model_validator

from paceline.algo.settings import AlgorithmSettings
from paceline.data.held_out import EvaluationSettings
from paceline.data.prompts import DataSettings
from paceline.errors import ConfigError
from paceline.hints import FOREIGN_NAMES, explain
from paceline.placement import PlacementSettings, RaySettings
from paceline.plugins import Plugin
from paceline.queue.message_queue import QueueSettings
from paceline.recipe import find_recipe, read_recipe
from paceline.reward.reward import RewardSettings
from paceline.rollout.fleet import FleetSettings
from paceline.rollout.rollouter import RolloutSettings
from paceline.schedule import ScheduleSettings
from paceline.settings import (
    AUTO,
    Settings,
    SettingsT,
    all_names,
    find_section,
    is_automatic,
    walk_settings,
)
from paceline.sync.settings import MISMATCH_LIMITS, SyncSettings
from paceline.training.settings import TrainSettings
from paceline.translate.hydra import flatten, read_value
from paceline.translate.verl import is_foreign, translate
from paceline.types import Role

log = logging.getLogger(__name__)

SINKS = "paceline.sinks"  # entry points of track


class RunConfig(Settings):
    model: str = "tiny"
    """Local directory, GGUF file, Hugging Face model ID, or "tiny": a built-in model, created for
    the selected task on first use."""
    run_dir: str = Field("runs/default", min_length=1)
    """Directory of metrics, ledger, logs, summary and checkpoints. A run in it is resumed."""
    seed: int = Field(0, ge=0)
    """Seed of sampling, data order and adapters."""
    steps: int = Field(100, ge=1, validation_alias=AliasChoices("steps", "total_training_steps"))
    """Number of train steps."""
    groups_per_step: int = Field(
        16, ge=1, validation_alias=AliasChoices("groups_per_step", "train_batch_size")
    )
    """Prompts per train step."""
    group_size: int = Field(8, ge=1)
    """Completions per prompt."""
    save_every: int = Field(50, ge=0)
    """Train steps between checkpoints. 0: only at the end."""
    save_every_s: float = Field(0.0, ge=0)
    """Seconds between checkpoints, in addition to save_every. 0: off."""
    grace_s: float = Field(60.0, ge=0)
    """Maximum seconds to finish and save the current step after Ctrl-C or SIGTERM. 0: stop at once.
    """
    keep_checkpoints: int = Field(2, ge=1)
    """Number of checkpoints to keep."""
    save_samples: int = Field(1, ge=0)
    """Number of prompts per step whose completions and rewards are saved to samples.jsonl. 0: none.
    """
    step_timeout_s: float = Field(600.0, gt=0)
    """Maximum seconds for a train step."""
    stall_timeout_s: float = Field(300.0, gt=0)
    """Maximum seconds without a new token, group or train step before the run fails."""
    cluster: Literal["local", "ray"] = "local"
    """Where workers run: in processes of this machine, or on Ray."""
    track: tuple[Plugin, ...] = ()
    """Sinks that get the metrics of each step: custom functions or classes, as "file.py:function".
    """

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

    @field_validator("track", mode="before")
    @classmethod
    def _one_sink_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str | Plugin) or callable(value) else value

    @field_validator("track")
    @classmethod
    def _known_sinks(cls, sinks: tuple[Plugin, ...]) -> tuple[Plugin, ...]:
        for sink in sinks:
            sink.check(SINKS)
        return sinks

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
    def max_queue_size(self) -> int:
        return self.queue.max_queue_size or self.schedule.capacity(self.groups_per_step)


# Settings that a resumed run may change: they do not change what is learned. They say how long, on
# what hardware and how it is observed, or fix what ended the run (too little memory, time or
# workers). Data may move; its content is compared.
MAY_CHANGE = {
    *("save_every_s", "grace_s"),
    *("run_dir", "steps", "save_every", "keep_checkpoints", "save_samples", "track"),
    *("step_timeout_s", "stall_timeout_s", "sync", "fleet", "cluster", "ray", "data.path"),
    "evaluation",
    *("train.backend", "train.tensor_parallel", "train.pipeline_parallel", "train.offload"),
    *("train.micro_batch_tokens", "train.gradient_checkpointing"),
    *("placement.train_ranks", "placement.rollout_workers", "placement.threads"),
    "placement.min_gpus",
    *("rollout.slots", "rollout.kv_memory_fraction", "rollout.generation_timeout"),
    *("rollout.tensor_parallel", "rollout.pipeline_parallel", "rollout.max_failed_groups"),
    *("reward.timeout_s", "reward.workers"),
    *("epochs", "validation.path", "validation.every"),  # of supervised runs
}
# Settings that exclude each other: one on the command line replaces the others in the recipe.
ALTERNATIVES = (
    ("data.task", "data.path", "data.source"),
    ("evaluation.task", "evaluation.path", "evaluation.source"),
    ("reward.function", "reward.model"),
    ("validation.path", "validation.rows"),
)


def load_config(
    recipe: str | Path | None = None,
    overrides: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Read a recipe, then apply `values` and `key=value` overrides, in this order.

    `values` are Python objects by name: nested mappings or dotted names. Raise ConfigError with a
    line per mistake.
    """
    found: dict[str, Any] = {}
    own: list[tuple[str, Any]] = []
    if recipe is not None:
        path = find_recipe(recipe)
        own = [("run_dir", f"runs/{path.stem}"), *flatten(read_recipe(path))]
        if any(key == "rows_per_step" for key, _ in own):
            raise ConfigError(
                f"recipe {recipe} is for supervised fine-tuning; run it with: paceline sft {recipe}"
            )
    own, foreign = _split(own)
    given, more = _split(
        [*flatten(values or {}), *(parse_setting(override) for override in overrides)]
    )
    # Settings of verl, as in its command, complete each other wherever they are given.
    complete = recipe is None or bool(foreign)
    translated = _translate(foreign | more, dict(own + given), complete)
    for settings in (own, translated, given):
        for key, value in settings:
            apply_setting(found, key, value, RunConfig)
        drop_alternatives(found, {key for key, value in settings if value is not None})
    return validated(RunConfig, found, recipe)


def validated(
    model: type[SettingsT], values: Mapping[str, Any], recipe: str | Path | None
) -> SettingsT:
    """Return the checked settings. Raise ConfigError with a line per mistake."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        where = f" in {recipe}" if recipe is not None else ""
        lines = [line for problem in error.errors() for line in explain(problem, model)]
        raise ConfigError(
            f"{len(lines)} wrong setting{'s' if len(lines) > 1 else ''}{where}:\n"
            + "\n".join(f"  {x}" for x in lines)
        ) from None


def split_settings(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return Paceline's settings and verl's, both by dotted name."""
    own, foreign = _split(flatten(values))
    return dict(own), foreign


def _split(settings: Iterable[tuple[str, Any]]) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
    own: list[tuple[str, Any]] = []
    foreign: dict[str, Any] = {}
    for key, value in settings:
        if _is_foreign(key, value):
            foreign[key] = value
        else:
            own.append((key, value))
    return own, foreign


def is_setting(key: str) -> bool:
    """Return whether a dotted name is one of Paceline's settings or sections."""
    return key in _own_names()


def _is_foreign(key: str, value: Any) -> bool:
    return not is_setting(key) and is_foreign(key, value)


@functools.cache
def _own_names() -> frozenset[str]:
    """Return the dotted names of all settings and sections."""
    names = set()
    for setting, field in walk_settings(RunConfig):
        *sections, _ = setting.split(".")
        names |= {".".join([*sections, name]) for name in all_names(setting, field)}
        names |= {".".join(sections[:end]) for end in range(1, len(sections) + 1)}
    return frozenset(names)


def _translate(
    foreign: Mapping[str, Any], base: Mapping[str, Any], complete: bool
) -> list[tuple[str, Any]]:
    """Translate verl's settings. Raise ConfigError if one has no counterpart."""
    translation = translate(foreign, base, complete)
    if translation.missing:
        raise ConfigError(
            f"{len(translation.missing)} of verl's settings cannot be used:\n"
            + "\n".join(f"  {name}: {reason}" for name, reason in translation.missing.items())
            + "\nRemove them. `paceline translate` with the same file or settings writes a recipe "
            "and lists everything that differs"
        )
    if translation.notes:
        log.warning(
            "ignored or changed settings of verl: %s (`paceline translate` gives the reasons)",
            ", ".join(translation.notes),
        )
    return list(translation.settings.items())


def drop_alternatives(values: dict[str, Any], given: set[str]) -> None:
    """Remove from a recipe what excludes a given setting."""
    for names in ALTERNATIVES:
        for chosen, other in permutations(names, 2):
            section, name = other.split(".")
            if chosen in given and other not in given and isinstance(values[section], dict):
                values[section].pop(name, None)


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


def describe_settings(
    under: str = "", model: type[Settings] = RunConfig
) -> list[tuple[str, str, str]]:
    """Return name, default and description of every setting whose name starts with `under`.

    If there is none, return those whose name contains it, or that other libraries call so.
    """
    found: list[tuple[str, str, str]] = []
    for name, field in walk_settings(model):
        words = (field.description or "").split()
        if get_origin(field.annotation) is Literal:
            words.append(f"One of {', '.join(get_args(field.annotation))}.")
        default = AUTO if is_automatic(field) else _as_written(field.get_default())
        found.append((name, default, " ".join(words)))
    starts = [row for row in found if row[0].startswith(under)]
    return starts or [row for row in found if under in row[0] or FOREIGN_NAMES.get(under) == row[0]]


def _as_written(value: Any) -> str:
    """Format a value as on the command line."""
    if value is None:
        return "unset"
    return json.dumps(value) if isinstance(value, bool | tuple) else str(value)


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


def parse_setting(override: str) -> tuple[str, Any]:
    """Split `key=value` and read the value as TOML does, or as Hydra does for a key of verl."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(
            f"{override!r} is not a setting; write key=value, for example schedule.max_staleness=2"
        )
    if _is_foreign(key.lstrip("+"), text):
        return key.lstrip("+"), read_value(text)
    try:
        return key, tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return key, text  # a bare word is a string: data.task=sort:5


def apply_setting(values: dict[str, Any], key: str, value: Any, model: type[Settings]) -> None:
    """Set a dotted name in nested dicts, under whatever name of the setting was set before."""
    *sections, name = key.split(".")
    target = values
    for section in sections:
        target = target.setdefault(section, {})
        if not isinstance(target, dict):
            raise ConfigError(f"{key}={value}: {section!r} is a single setting, not a section")
    for alias in _aliases(sections, name, model):
        target.pop(alias, None)
    target[name] = value


def _aliases(sections: Sequence[str], name: str, model: type[Settings]) -> list[str]:
    """Return all names of a setting, so that the command line replaces any of them."""
    for field_name, field in find_section(model, sections).model_fields.items():
        if name in (names := all_names(field_name, field)):
            return names
    return []
