"""Memory of each rank of a planned worker while it trains, generates and syncs weights.

Roles of a worker alternate. With train.offload a role that does not work is in host memory, and the
engine releases its memory during a train step; otherwise all of them stay on the device. Without a
GPU, host memory is the device, so only the engine's memory is released.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from transformers import AutoModelForSequenceClassification, PretrainedConfig

from paceline.config import RunConfig
from paceline.data.tasks import BUILT_IN_MODELS
from paceline.data.tiny import resolve_model
from paceline.data.tiny_reward import resolve_reward_model
from paceline.model.linear import packs
from paceline.model.loading import load_config
from paceline.model.shape import model_shape
from paceline.placement import TRAINED_ROLES
from paceline.rollout.vllm_memory import Split, full_kv_bytes, weight_bytes
from paceline.training.memory import (
    activation_bound,
    largest_parameter,
    memory_estimate,
    parameter_count,
    parameter_shapes,
)
from paceline.training.settings import TrainSettings
from paceline.types import Role
from paceline.workers.cluster import PlannedWorker


class Phase(StrEnum):
    TRAIN = "train"
    GENERATE = "generate"
    SYNC = "sync"


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    fixed: int  # required
    at_most: int  # with all activations and a full KV cache

    def __add__(self, other: "MemoryNeed") -> "MemoryNeed":
        return MemoryNeed(self.fixed + other.fixed, self.at_most + other.at_most)


Needs = dict[str, MemoryNeed]  # by what needs it, for example "actor optimizer"


@dataclass(frozen=True, slots=True)
class Models:
    """Configurations of the models of a run."""

    policy: PretrainedConfig
    reward: PretrainedConfig | None = None
    teacher: PretrainedConfig | None = None

    @classmethod
    def of(cls, config: RunConfig, policy: PretrainedConfig) -> "Models":
        reward, teacher = config.reward.model, config.algorithm.teacher
        if teacher and teacher.partition(":")[0] in BUILT_IN_MODELS:
            teacher = resolve_model(teacher, config.data.task)
        return cls(
            policy,
            load_config(resolve_reward_model(reward)) if reward else None,
            load_config(teacher) if teacher else None,
        )

    def of_role(self, role: Role) -> PretrainedConfig:
        """Return the model of a role that trains or is the reference."""
        return self.teacher if role is Role.REF and self.teacher else self.policy


def total(needs: Mapping[str, MemoryNeed]) -> MemoryNeed:
    return sum(needs.values(), MemoryNeed(0, 0))


class WorkerMemory:
    """The estimate for one planned worker, on its rank that holds the most.

    `device_bytes`: memory of its GPU, which limits the KV cache; 0: unknown.
    """

    def __init__(
        self,
        plan: PlannedWorker,
        config: RunConfig,
        models: Models,
        *,
        gpu: bool = False,
        device_bytes: int = 0,
    ) -> None:
        self._plan, self._config, self._models = plan, config, models
        self._gpu, self._device_bytes = gpu, device_bytes
        self._offload = config.train.offload
        self._moves = config.train.offload and gpu  # whether idle roles leave the device
        self._item = 2 if config.train.dtype == "bfloat16" else 4
        self._trained = [role for role in TRAINED_ROLES if role in plan.roles]
        self._estimates = {role: self._estimate(role) for role in self._trained}

    def phases(self) -> dict[Phase, Needs]:
        """Return the needs of each phase that this worker has."""
        found: dict[Phase, Needs] = {}
        if self._trained:
            steps = [self._train(role) for role in self._trained]
            found[Phase.TRAIN] = max(steps, key=lambda needs: total(needs).at_most)
        if Role.ROLLOUT in self._plan.roles:
            found[Phase.GENERATE] = self._generate()
        if {Role.ACTOR, Role.ROLLOUT} & set(self._plan.roles) and not self._in_place:
            found[Phase.SYNC] = self._sync()
        if not found:
            found[Phase.GENERATE] = self._resident()
        return {
            phase: {k: v for k, v in needs.items() if v.at_most} for phase, needs in found.items()
        }

    def peak(self) -> MemoryNeed:
        sums = [total(needs) for needs in self.phases().values()]
        return MemoryNeed(max(s.fixed for s in sums), max(s.at_most for s in sums))

    # -- phases

    def _train(self, role: Role) -> Needs:
        needs = self._resident() | self._idle(self._trained)
        if self._moves:
            needs = self._resident() | self._idle([role])
            if self._config.shares_weights and role is not Role.ACTOR:
                needs |= _exact({"engine weights": self._weights()})
        needs |= self._working(role)
        if Role.ROLLOUT in self._plan.roles:
            keeps_cache = not self._offload or self._config.placement.overlap
            keeps_weights = keeps_cache or self._copies_in_process
            needs |= self._engine_weights() if keeps_weights else {}
            needs |= self._cache() if keeps_cache else {}
            needs |= self._packed() if self._config.placement.overlap else {}
        return needs

    def _generate(self) -> Needs:
        needs = self._resident() | self._engine_weights()
        if not self._moves:
            needs |= self._idle(self._trained)
        elif self._config.shares_weights and self._trained:
            needs |= _exact({"engine weights": self._weights()})
        return needs | self._cache() | self._packed()

    def _sync(self) -> Needs:
        actor = [Role.ACTOR] if Role.ACTOR in self._trained else []
        needs = self._resident() | self._idle(actor if self._moves else self._trained)
        needs |= _exact({"largest tensor": largest_parameter(self._models.policy) * 4})
        if Role.ROLLOUT in self._plan.roles:
            needs |= self._engine_weights()
            needs |= {} if self._offload and actor else self._cache()
        return needs

    # -- parts

    def _has_adapters(self, role: Role) -> bool:
        """Return whether it is the actor with adapters, or the actor without them as reference."""
        is_reference = role is Role.REF and not self._models.teacher
        is_actor = role is Role.ACTOR or (is_reference and Role.ACTOR in self._plan.roles)
        return is_actor and self._config.train.lora is not None

    def _settings(self, role: Role) -> TrainSettings:
        train = self._config.train
        return train if self._has_adapters(role) else train.model_copy(update={"lora": None})

    def _estimate(self, role: Role) -> dict[str, int]:
        return memory_estimate(
            self._models.of_role(role),
            self._settings(role),
            self._plan.processes,
            gpu=self._gpu,
            critic=role is Role.CRITIC,
        )

    def _idle(self, roles: list[Role]) -> Needs:
        """Return what roles hold between their calls."""
        needs: Needs = {}
        for role in roles:
            estimate = self._estimates[role]
            frozen = role is Role.REF or self._has_adapters(role)
            if role is Role.REF and self._has_adapters(role) and Role.ACTOR in roles:
                continue  # it is the actor without its adapters
            parts = ["parameters"] if frozen else ["parameters", "optimizer"]
            if self._config.train.backend == "megatron" and not frozen:
                parts.append("gradients")  # a buffer that stays
            needs |= _exact({f"{role} {part}": estimate[part] for part in parts})
        return needs

    def _working(self, role: Role) -> Needs:
        """Return what a role holds during its call in addition."""
        estimate, train = self._estimates[role], role is not Role.REF
        frozen = not train or self._has_adapters(role)
        gathered = estimate["gathered"] if train else estimate["gathered"] // 2  # no gradients
        needs = _exact({f"{role} gathered layers": gathered})
        if not frozen:
            needs |= _exact({f"{role} gradients": estimate["gradients"]})
        activations = (
            estimate["activations"]
            if train
            else activation_bound(
                self._models.of_role(role), self._settings(role), gpu=self._gpu, train=False
            )
        )
        return needs | {f"{role} activations": MemoryNeed(0, activations)}

    def _resident(self) -> Needs:
        """Return the reward model, which is never offloaded."""
        if Role.REWARD not in self._plan.roles or self._models.reward is None:
            return {}
        count = parameter_count(self._models.reward, AutoModelForSequenceClassification)
        return _exact({"reward model": count * self._item})

    @property
    def _in_place(self) -> bool:
        return self._config.shares_weights and set(self._plan.roles) >= {Role.ACTOR, Role.ROLLOUT}

    @property
    def _copies_in_process(self) -> bool:
        """Whether the native engine has a copy next to a single-process trainer; it stays."""
        config = self._config
        return config.in_place and config.rollout.engine == "native" and not config.shares_weights

    @property
    def _split(self) -> Split:
        rollout = self._config.rollout
        return Split(rollout.tensor_parallel, rollout.pipeline_parallel)

    def _weights(self) -> int:
        shapes = parameter_shapes(self._models.policy)
        fp8 = self._config.rollout.weight_dtype == "fp8"
        return weight_bytes(shapes, self._config.train.dtype, self._split, fp8)

    def _engine_weights(self) -> Needs:
        return {} if self._in_place else _exact({"engine weights": self._weights()})

    def _packed(self) -> Needs:
        """Return the native engine's second copy of its weights while it generates."""
        size = self._weights() // self._item * 4  # a CPU computes in float32
        native = self._config.rollout.engine == "native"
        used = native and not self._gpu and packs(size)
        return {"engine weights, packed": MemoryNeed(0, size)} if used else {}

    def _cache(self) -> Needs:
        """Return the KV cache: at least one sequence, at most all slots or its part of the GPU."""
        config, shape = self._config, model_shape(self._models.policy)
        heads = -(-shape.kv_heads // self._split.tensor)
        layers = -(-shape.layers // self._split.pipeline)
        # Without a GPU, the native engine rounds to FP8 but stores what it computes with.
        fp8 = self._gpu and config.rollout.kv_cache_dtype == "fp8"
        token = 2 * layers * heads * shape.head_dim * (1 if fp8 else self._item)
        longest = config.data.max_prompt_length + config.rollout.max_response_length
        sequence = token * longest
        full = sequence * config.slots
        if config.rollout.engine == "vllm":  # in blocks
            dtype = "float8_e4m3fn" if fp8 else config.train.dtype
            full = full_kv_bytes(self._models.policy, dtype, config.slots, longest, self._split)
        if self._gpu and self._device_bytes:
            # The engine starts before the optimizer has state.
            idle = (
                [] if self._offload else [self._estimates[r]["parameters"] for r in self._trained]
            )
            weights = self._weights() if self._offload or not self._in_place else 0
            free = self._device_bytes - total(self._resident()).fixed - sum(idle) - weights
            full = min(full, max(sequence, int(free * config.rollout.kv_memory_fraction)))
        return {"KV cache": MemoryNeed(sequence, full)}


def _exact(sizes: Mapping[str, int]) -> Needs:
    return {name: MemoryNeed(size, size) for name, size in sizes.items()}
