"""Which role lives in which resource pool. Roles in one pool share its devices and take turns; pools work side by side."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field, model_validator

from paceline.errors import ConfigError
from paceline.settings import Settings
from paceline.types import Role
from paceline.workers.cluster import Device, Node


class RaySettings(Settings):
    address: str = "local"
    """Where the Ray cluster is (host:port, or "auto" for the one this machine belongs to). "local": one of our own, for this run."""


class PlacementSettings(Settings):
    actor: str = "main"
    """Pool of the model that learns."""
    rollout: str = "main"
    """Pool of the engines that generate."""
    critic: str | None = None
    """Pool of the critic, when the algorithm has one. Unset: the actor's."""
    ref: str | None = None
    """Pool of the frozen reference model, when the algorithm needs one. Unset: the actor's."""
    reward: str | None = None
    """Pool of the reward model, when there is one. Unset: the actor's, where it waits while the actor trains."""
    rollout_workers: int = Field(1, ge=1)
    """Engines in the rollout pool."""
    train_ranks: int = Field(1, ge=1)
    """Processes in each pool that trains, or holds the reference model, when train.backend has several."""
    threads: int = Field(0, ge=0)
    """CPU threads per worker; 0 = the machine's cores divided among the workers."""
    overlap: bool = False
    """Where actor and rollout share a pool: generate while training, on a second stream of the same GPU (a second thread on a CPU) and
    with a copy of the weights. Off: they take turns on the same weights. Worth it with schedule.max_staleness above 0."""

    @model_validator(mode="after")
    def _overlap_on_one_pool(self) -> "PlacementSettings":
        elsewhere = [
            f"placement.{role.value} = {self.pool(role)!r}"
            for role in Role
            if self.pool(role) != self.actor
        ]
        if self.overlap and elsewhere:
            raise ValueError(
                f"placement.overlap = true contradicts {', '.join(elsewhere)}: it is for one device that has all roles "
                f"(pool {self.actor!r}); pools of their own work side by side anyway"
            )
        return self

    @model_validator(mode="after")
    def _one_engine_when_shared(self) -> "PlacementSettings":
        if self.rollout_workers > 1 and self.rollout == self.actor:
            raise ValueError(
                f"placement.rollout_workers = {self.rollout_workers} contradicts placement.rollout = placement.actor = {self.actor!r}: "
                f"on a shared pool the one engine reads the trainer's own weights; give rollout its own pool or set rollout_workers = 1"
            )
        return self

    def pool(self, role: Role) -> str:
        return str(getattr(self, role.value) or self.actor)

    def shared(self, one: Role, other: Role) -> bool:
        return self.pool(one) == self.pool(other)


ACTOR_ROLLOUT_REF_POOL, CRITIC_POOL = "actor_rollout_ref_pool", "critic_pool"


@dataclass(frozen=True, slots=True)
class ResourcePool:
    """Devices under one name."""

    name: str
    devices: tuple[Device, ...]


def split(nodes: Sequence[Node]) -> tuple[ResourcePool, ResourcePool]:
    """Halves: of the machines when there are several, else of the one machine's devices. The first is the larger, where they differ."""
    parts = [node.devices for node in nodes if node.devices]
    if len(parts) == 1:
        parts = [(device,) for device in parts[0]]
    half = (len(parts) + 1) // 2
    first = tuple(device for part in parts[:half] for device in part)
    second = tuple(device for part in parts[half:] for device in part)
    return ResourcePool(ACTOR_ROLLOUT_REF_POOL, first), ResourcePool(CRITIC_POOL, second or first)


class Placement:
    """Hands out the devices of a cluster, pool by pool. Pools named as `split` names them get their halves; others take what they need
    in order. When all devices are taken they are shared, the least used first."""

    def __init__(self, nodes: Sequence[Node], pools: Sequence[str]) -> None:
        gpus = any(node.gpus for node in nodes)
        nodes = [
            node for node in nodes if node.gpus or not gpus
        ]  # with GPUs about, a CPU is no device
        self._gpus = gpus
        everything = tuple(device for node in nodes for device in node.devices)
        halves = split(nodes) if set(pools) == {ACTOR_ROLLOUT_REF_POOL, CRITIC_POOL} else ()
        self.pools: Mapping[str, ResourcePool] = {
            name: ResourcePool(name, everything) for name in pools
        } | {pool.name: pool for pool in halves}
        self.used: Counter[Device] = Counter()

    def take(self, pool: str, count: int) -> tuple[Device, ...]:
        """Devices for the ranks of one worker: on one node if that has room, else over several."""
        devices = self.pools[pool].devices
        if self._gpus and count > len(devices):
            raise ConfigError(
                f"pool {pool!r} needs {count} GPUs for its ranks and has {len(devices)}; lower placement.train_ranks"
            )
        free = [device for device in devices if not self.used[device]]
        by_node = Counter(device.node for device in free)
        home = next((node for node, room in by_node.items() if room >= count), None)
        chosen = [device for device in free if home is None or device.node == home][:count]
        while (
            len(chosen) < count
        ):  # shared; two ranks of one group on a device only where devices are CPU slots
            others = [device for device in devices if device not in chosen] or list(devices)
            chosen.append(min(others, key=lambda device: self.used[device] + chosen.count(device)))
        self.used.update(chosen)
        return tuple(chosen)
