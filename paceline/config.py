"""All settings of a run: a TOML recipe plus `key=value` from the command line, checked before
anything starts.

Each part's settings are declared beside the part; this file puts them together and checks what
concerns several of them.
"""

import difflib
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import AliasChoices, BaseModel, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from paceline.algo.settings import AlgorithmSettings
from paceline.data.prompts import DataSettings
from paceline.errors import ConfigError
from paceline.placement import PlacementSettings, RaySettings
from paceline.queue.message_queue import QueueSettings
from paceline.reward.reward import RewardSettings
from paceline.rollout.fleet import FleetSettings
from paceline.rollout.rollouter import RolloutSettings
from paceline.schedule import ScheduleSettings
from paceline.settings import Settings
from paceline.sync.settings import MISMATCH_LIMITS, SyncSettings
from paceline.train.settings import TrainSettings
from paceline.types import Role


class RunConfig(Settings):
    model: str = "tiny"
    """A local folder, a hub id, or "tiny": a model of our own, made on first use for the task at
    hand."""
    run_dir: str = Field("runs/default", min_length=1)
    """Where metrics, ledger, logs, summary and checkpoints go. An existing run there is continued.
    """
    seed: int = Field(0, ge=0)
    steps: int = Field(100, ge=1, validation_alias=AliasChoices("steps", "total_training_steps"))
    """Train steps to make."""
    groups_per_step: int = Field(
        16, ge=1, validation_alias=AliasChoices("groups_per_step", "train_batch_size")
    )
    """Prompts a train step learns from."""
    group_size: int = Field(8, ge=1)
    """Attempts at each prompt."""
    save_every: int = Field(50, ge=0)
    """Steps between checkpoints; 0 = only at the end."""
    keep_checkpoints: int = Field(2, ge=1)
    save_samples: int = Field(1, ge=0)
    """Prompts of each step whose answers go to samples.jsonl, with their rewards."""
    step_timeout_s: float = Field(600.0, gt=0)
    """Longest a train step may take."""
    stall_timeout_s: float = Field(300.0, gt=0)
    """Longest the run may go without a token, a group or a step."""
    cluster: Literal["local", "ray"] = "local"
    """What workers are started with: processes of this machine, or Ray."""

    data: DataSettings = DataSettings()
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

    @model_validator(mode="after")
    def _consistent(self) -> "RunConfig":
        if self.max_queue_size < self.groups_per_step:
            raise ValueError(
                f"queue.max_queue_size = {self.queue.max_queue_size} contradicts groups_per_step = {self.groups_per_step}: "
                f"a queue smaller than one batch can never fill one; raise max_queue_size to at least {self.groups_per_step}"
            )
        if self.group_size == 1 and self.algorithm.compares_completions:
            raise ValueError(
                f"group_size = 1 contradicts algorithm.name = {self.algorithm.name!r}: it compares attempts at one prompt, "
                f"so one attempt teaches nothing; set group_size to 2 or more, or algorithm.name = 'ppo'"
            )
        if self.group_size == 1 and self.algorithm.dynamic_sampling:
            raise ValueError(
                "group_size = 1 contradicts algorithm.dynamic_sampling = true: one attempt is as good as itself, so every group would be "
                "replaced; set group_size to 2 or more, or dynamic_sampling = false"
            )
        if (least := self.rollout.min_group_size) is not None and least > self.group_size:
            raise ValueError(
                f"rollout.min_group_size = {least} contradicts group_size = {self.group_size}: it cannot be larger"
            )
        if (
            self.heartbeat_timeout_s >= self.rollout.generation_timeout
            and self.fleet.heartbeat_timeout_s is not None
        ):
            raise ValueError(
                f"fleet.heartbeat_timeout_s = {self.heartbeat_timeout_s:g} contradicts rollout.generation_timeout = "
                f"{self.rollout.generation_timeout:g}: a silent worker would be taken for slow answers; set it lower, or leave it unset"
            )
        ranks, parts = (
            self.placement.train_ranks,
            self.train.tensor_parallel * self.train.pipeline_parallel,
        )
        if ranks > 1 and self.train.backend == "single":
            raise ValueError(
                f"placement.train_ranks = {ranks} contradicts train.backend = 'single', which is one process; use 'fsdp' or 'megatron'"
            )
        if self.placement.overlap and self.train.backend != "single":
            raise ValueError(
                f"placement.overlap = true contradicts train.backend = {self.train.backend!r}: it is for one device; give rollout a pool "
                f"of its own instead"
            )
        if ranks % parts:
            raise ValueError(
                f"placement.train_ranks = {ranks} contradicts train.tensor_parallel x train.pipeline_parallel = {parts}: "
                f"a model needs that many ranks; set train_ranks to a multiple of {parts}"
            )
        if self.rollout.engine == "vllm" and self.placement.shared(Role.ACTOR, Role.ROLLOUT):
            wrong = (
                f"train.backend = {self.train.backend!r}"
                if self.train.backend != "single"
                else "placement.overlap = true"
            )
            if self.train.backend != "single" or self.placement.overlap:
                raise ValueError(
                    f"rollout.engine = 'vllm' in the trainer's pool contradicts {wrong}: vLLM takes turns with one process; give rollout a "
                    f"pool of its own"
                )
        return self

    @model_validator(mode="after")
    def _pools_have_roles(self) -> "RunConfig":
        for role, used, how in (
            (
                Role.CRITIC,
                self.algorithm.needs_critic,
                "use an algorithm with a critic (algorithm.name = 'ppo')",
            ),
            (Role.REF, self.algorithm.needs_reference, "set algorithm.kl_coef above 0"),
            (Role.REWARD, self.reward.model is not None, "set reward.model"),
        ):
            pool = self.placement.pool(role)
            if not used and pool not in (self.placement.actor, self.placement.rollout):
                raise ValueError(
                    f"placement.{role.value} = {pool!r} would stay empty, since this run has no {role.value} model; {how}, or leave it "
                    f"unset (in a recipe that sets it: placement.{role.value}={self.placement.actor})"
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
        return self

    @property
    def mismatch_limit(self) -> float:
        return self.sync.mismatch_limit or MISMATCH_LIMITS[self.train.dtype]

    @property
    def in_place(self) -> bool:
        """Whether the engine reads the trainer's own parameters, so that new weights need not
        travel."""
        return self.train.backend == "single" and self.placement.shared(Role.ACTOR, Role.ROLLOUT)

    @property
    def shares_weights(self) -> bool:
        """Whether the engine computes with the trainer's very own parameters, which change under
        whatever it generates."""
        return (
            self.in_place
            and not self.placement.overlap
            and self.train.lora is None
            and self.rollout.engine == "native"
        )

    @property
    def heartbeat_timeout_s(self) -> float:
        return self.fleet.heartbeat_timeout_s or min(
            30.0, max(5.0, self.rollout.generation_timeout / 2)
        )

    @property
    def slots(self) -> int:
        """Of each engine: no more than attempts can be under way, since every slot has its memory."""
        attempts = self.group_size + self.algorithm.needs_greedy_baseline
        return min(self.rollout.slots, self.schedule.capacity(self.groups_per_step) * attempts)

    @property
    def max_queue_size(self) -> int:
        return self.queue.max_queue_size or self.schedule.capacity(self.groups_per_step)


# Settings that may differ when a run is continued: they change how long, on what or how it is
# watched, not what is learned.
MAY_CHANGE = {
    "run_dir",
    "steps",
    "save_every",
    "keep_checkpoints",
    "save_samples",
    "step_timeout_s",
    "stall_timeout_s",
    "sync",
    "fleet",
    "cluster",
    "ray",
}
MAY_CHANGE |= {
    "train.backend",
    "train.tensor_parallel",
    "train.pipeline_parallel",
    "train.offload",
    "placement.train_ranks",
}
# What a run may have ended for: too little memory, too little time, too few workers. Data may move;
# their content is compared.
MAY_CHANGE |= {
    "train.micro_batch_tokens",
    "train.gradient_checkpointing",
    "rollout.slots",
    "rollout.kv_memory_fraction",
}
MAY_CHANGE |= {
    "rollout.generation_timeout",
    "rollout.max_failed_groups",
    "reward.timeout_s",
    "reward.workers",
    "data.path",
}
MAY_CHANGE |= {"placement.rollout_workers", "placement.threads"}
# Of these a run has one or the other: what the command line chooses replaces what the recipe has
# chosen.
ALTERNATIVES = (("data.task", "data.path"), ("reward.function", "reward.model"))


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe and apply `key=value` settings. Raises ConfigError with one line per mistake."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"recipe {path} does not exist{_similar_recipes(Path(path))}"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"recipe {path} cannot be read: {error}") from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"recipe {path} is not valid TOML: {error}") from None
        values = {"run_dir": f"runs/{Path(path).stem}"} | values
    given = {_apply(values, override) for override in overrides}
    for pair in ALTERNATIVES:
        for chosen, other in (pair, pair[::-1]):
            section, name = other.split(".")
            if chosen in given and other not in given and isinstance(values[section], dict):
                values[section].pop(name, None)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        where = f" in {path}" if path is not None else ""
        lines = [_explain(problem) for problem in error.errors()]
        raise ConfigError(
            f"{len(lines)} wrong setting{'s' if len(lines) > 1 else ''}{where}:\n"
            + "\n".join(f"  {x}" for x in lines)
        ) from None


def check_trainable(config: RunConfig) -> None:
    """Raise ConfigError for sampling settings that are valid only for evaluation."""
    rollout = config.rollout
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


def describe_settings(under: str = "") -> list[tuple[str, str, str]]:
    """Name, default and meaning of every setting whose name begins so."""
    found: list[tuple[str, str, str]] = []

    def walk(model: type[BaseModel], prefix: str) -> None:
        for name, field in model.model_fields.items():
            section = _section([*prefix.split(".")[:-1], name])
            if section is not model and section is not RunConfig:
                walk(section, f"{prefix}{name}.")
            elif f"{prefix}{name}".startswith(under):
                choices = (
                    f"One of {', '.join(get_args(field.annotation))}."
                    if get_origin(field.annotation) is Literal
                    else ""
                )
                default = _as_written(field.get_default(call_default_factory=True))
                found.append(
                    (
                        f"{prefix}{name}",
                        default,
                        " ".join([*(field.description or "").split(), choices]).strip(),
                    )
                )

    walk(RunConfig, "")
    return found


def _as_written(value: Any) -> str:
    """As it would be written on the command line."""
    if value is None:
        return "unset"
    return (
        str(value).lower()
        if isinstance(value, bool)
        else json.dumps(value)
        if isinstance(value, tuple)
        else str(value)
    )


def differences(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """Settings that are not the same in two configurations, apart from those that may change."""
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


def _apply(values: dict[str, Any], override: str) -> str:
    """Set what `key=value` says; returns the key."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(
            f"{override!r} is not a setting; write key=value, for example schedule.max_staleness=2"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string: data.task=sort:5
    *sections, name = key.strip().split(".")
    target = values
    for section in sections:
        target = target.setdefault(section, {})
        if not isinstance(target, dict):
            raise ConfigError(f"{key}={text}: {section!r} is a single setting, not a section")
    for alias in _aliases(sections, name):
        target.pop(alias, None)
    target[name] = value
    return key.strip()


def _aliases(sections: Sequence[str], name: str) -> list[str]:
    """Other spellings of the same setting, so that the command line replaces what the recipe says."""
    for field_name, names in _names(_section(sections)).items():
        if name in names or name == field_name:
            return [field_name, *names]
    return []


def _section(path: Sequence[str | int]) -> type[BaseModel]:
    model: type[BaseModel] = RunConfig
    for part in path:
        field = model.model_fields.get(str(part))
        kinds = (
            get_args(field.annotation) or (field.annotation,) if field else ()
        )  # a section may be optional: LoraSettings | None
        model = next(
            (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)),
            model,
        )
    return model


def _names(model: type[BaseModel]) -> dict[str, list[str]]:
    names = {}
    for name, field in model.model_fields.items():
        alias = field.validation_alias
        names[name] = (
            [str(choice) for choice in alias.choices] if isinstance(alias, AliasChoices) else [name]
        )
    return names


def _explain(problem: ErrorDetails) -> str:
    location = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        known = sorted(
            {name for names in _names(_section(problem["loc"][:-1])).values() for name in names}
        )
        close = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"
        return f"unknown setting {location!r}; {hint}"
    if problem["type"] == "value_error":
        what = str(problem["ctx"]["error"])
        return (
            what
            if not location or what.startswith(f"{problem['loc'][0]}.")
            else f"{location}: {what}"
        )
    if problem["type"] == "model_type":
        return f"{location} = {problem['input']!r}: this is a section; set what is in it, for example {location}.{_first(problem['loc'])}=..."
    if problem["type"] == "tuple_type":
        return f"{location} = {problem['input']!r}: expected a list, in brackets"
    return f"{location} = {problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}"


def _first(path: Sequence[str | int]) -> str:
    return next(iter(_section(path).model_fields))


def _similar_recipes(path: Path) -> str:
    near = (
        sorted(str(other) for other in path.parent.glob("*.toml")) if path.parent.is_dir() else []
    )
    close = difflib.get_close_matches(str(path), near, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""
