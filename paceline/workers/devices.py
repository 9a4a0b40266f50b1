"""Devices of a cluster, assigned to resource pools: halved for split placement, else in order."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.workers.cluster import Device, Node

ACTOR_ROLLOUT_REF_POOL, CRITIC_POOL = "actor_rollout_ref_pool", "critic_pool"


@dataclass(frozen=True, slots=True)
class ResourcePool:
    name: str
    devices: tuple[Device, ...]


def split(nodes: Sequence[Node]) -> tuple[ResourcePool, ResourcePool]:
    """Return two halves: of the machines, or of the devices if there is one machine.

    If the number is odd, the first half is larger.
    """
    parts = [node.devices for node in nodes if node.devices]
    if len(parts) == 1:
        parts = [(device,) for device in parts[0]]
    half = (len(parts) + 1) // 2
    first = tuple(device for part in parts[:half] for device in part)
    second = tuple(device for part in parts[half:] for device in part)
    return ResourcePool(ACTOR_ROLLOUT_REF_POOL, first), ResourcePool(CRITIC_POOL, second or first)


class Placement:
    """Assigns the devices of a cluster, pool by pool.

    The two pools of `split` get their halves; other pools take devices in order. Once all devices
    are taken they are shared, the least used first.
    """

    def __init__(self, nodes: Sequence[Node], pools: Sequence[str]) -> None:
        gpus = any(node.gpus for node in nodes)
        # In a cluster with GPUs, a CPU slot is not a device.
        nodes = [node for node in nodes if node.gpus or not gpus]
        self._gpus = gpus
        everything = tuple(device for node in nodes for device in node.devices)
        halves = split(nodes) if set(pools) == {ACTOR_ROLLOUT_REF_POOL, CRITIC_POOL} else ()
        self.pools: Mapping[str, ResourcePool] = {
            name: ResourcePool(name, everything) for name in pools
        } | {pool.name: pool for pool in halves}
        self.used: Counter[Device] = Counter()

    def take(self, pool: str, count: int) -> tuple[Device, ...]:
        """Take devices for the ranks of one worker, on one node if it has enough."""
        devices = self.pools[pool].devices
        if self._gpus and count > len(devices):
            raise ConfigError(
                f"pool {pool!r} needs {count} GPUs for its ranks and has {len(devices)}; "
                "lower placement.train_ranks"
            )
        free = [device for device in devices if not self.used[device]]
        by_node = Counter(device.node for device in free)
        home = next((node for node, room in by_node.items() if room >= count), None)
        chosen = [device for device in free if home is None or device.node == home][:count]
        # Share devices; two ranks of one group share a device only if it is a CPU slot.
        while len(chosen) < count:
            others = [device for device in devices if device not in chosen] or list(devices)
            chosen.append(min(others, key=lambda device: self.used[device] + chosen.count(device)))
        self.used.update(chosen)
        return tuple(chosen)
