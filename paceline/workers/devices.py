"""Devices of a cluster, divided between resource pools.

Pools with a fixed number of devices take theirs first. The others divide the rest evenly: whole
machines if their number allows it, else devices. A unit is what is never divided: the ranks of one
replica of the model, or of one engine.
"""

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
    """Return two halves: of the machines if their number is even, else of the devices.

    If the number of devices is odd, the first half is larger.
    """
    first, second = divide([node.devices for node in nodes], (1, 1))
    return ResourcePool(ACTOR_ROLLOUT_REF_POOL, first), ResourcePool(CRITIC_POOL, second or first)


def divide(machines: Sequence[Sequence[Device]], units: Sequence[int]) -> list[tuple[Device, ...]]:
    """Divide devices into one part per pool, as evenly as machines and units allow.

    A part is empty if no unit of its pool is left.
    """
    machines = [devices for devices in machines if devices]
    count, rest = divmod(len(machines), len(units))
    if count and not rest:
        parts = [_joined(machines[i : i + count]) for i in range(0, len(machines), count)]
        if all(len(part) >= unit for part, unit in zip(parts, units, strict=True)):
            return parts
    devices = iter(_joined(machines))
    return [tuple(next(devices) for _ in range(size)) for size in _sizes(machines, units)]


def _sizes(machines: Sequence[Sequence[Device]], units: Sequence[int]) -> list[int]:
    """Return the sizes of the parts: a unit for each, then one more for the smallest, repeated."""
    free, sizes = sum(map(len, machines)), [0] * len(units)
    while fitting := [i for i, unit in enumerate(units) if unit <= free]:
        smallest = min(fitting, key=lambda i: (sizes[i] > 0, sizes[i]))
        sizes[smallest] += units[smallest]
        free -= units[smallest]
    return sizes


def _joined(machines: Sequence[Sequence[Device]]) -> tuple[Device, ...]:
    return tuple(device for devices in machines for device in devices)


class Placement:
    """Assigns the devices of a cluster, pool by pool.

    The two pools of `split` get their halves. Once all devices are taken they are shared, the least
    used first.
    """

    def __init__(self, nodes: Sequence[Node], pools: Sequence[str]) -> None:
        gpus = any(node.gpus for node in nodes)
        # In a cluster with GPUs, a CPU slot is not a device.
        nodes = [node for node in nodes if node.gpus or not gpus]
        self._gpus = gpus
        everything = _joined([node.devices for node in nodes])
        if not everything:
            names = ", ".join(node.name for node in nodes)
            raise ConfigError(
                f"no node has a GPU or a CPU slot ({names}); start Ray with --num-cpus or "
                "--num-gpus, or add a node"
            )
        self._halves = set(pools) == {ACTOR_ROLLOUT_REF_POOL, CRITIC_POOL}
        self.pools: dict[str, ResourcePool] = {
            name: ResourcePool(name, everything) for name in pools
        } | ({pool.name: pool for pool in split(nodes)} if self._halves else {})
        self.used: Counter[Device] = Counter()

    def fill(self, units: Mapping[str, int]) -> dict[str, tuple[Device, ...]]:
        """Divide the free devices between these pools and return the part of each.

        Without GPUs, and for a pool that no free unit is left for, the part is empty.
        """
        if not self._gpus or not units:
            return {pool: () for pool in units}
        if self._halves:
            return {pool: self._free(pool) for pool in units}
        free = self._free(next(iter(units)))
        nodes = dict.fromkeys(device.node for device in free)
        machines = [[device for device in free if device.node == node] for node in nodes]
        parts = dict(zip(units, divide(machines, list(units.values())), strict=True))
        for pool, part in parts.items():
            if part:
                self.pools[pool] = ResourcePool(pool, part)
        return parts

    def take(self, pool: str, count: int, setting: str, unit: int = 1) -> tuple[Device, ...]:
        """Take devices for the ranks of one worker, on one node if it has enough.

        `setting`: the one to lower if the pool is too small.
        """
        devices = self.pools[pool].devices
        if self._gpus and count > len(devices):
            fits = len(devices) // unit * unit or len(devices)
            raise ConfigError(
                f"pool {pool!r} needs {count} GPUs for its ranks and has {len(devices)}; "
                f"set {setting} to at most {fits}"
            )
        free = self._free(pool)
        by_node = Counter(device.node for device in free)
        home = next((node for node, room in by_node.items() if room >= count), None)
        chosen = [device for device in free if home is None or device.node == home][:count]
        # Share devices; two ranks of one group share a device only if it is a CPU slot.
        while len(chosen) < count:
            others = [device for device in devices if device not in chosen] or list(devices)
            chosen.append(min(others, key=lambda device: self.used[device] + chosen.count(device)))
        self.used.update(chosen)
        return tuple(chosen)

    def _free(self, pool: str) -> tuple[Device, ...]:
        return tuple(device for device in self.pools[pool].devices if not self.used[device])
