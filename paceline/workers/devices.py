"""Devices of a cluster, assigned to resource pools: halved for split placement, else in order."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.workers.cluster import Device, Node

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
