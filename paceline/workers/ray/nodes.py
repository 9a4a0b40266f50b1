"""The nodes of the connected Ray cluster: their devices, and which of them are free."""

import socket
from collections.abc import Callable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from paceline.errors import ConfigError
from paceline.workers.cluster import Node
from paceline.workers.ray.host import oldest_gpu, smallest_gpu

NODE_TIMEOUT_S = 1.0  # for a node to accept a connection
TASK_TIMEOUT_S = 60.0  # for a node to run a small function


def living_nodes() -> list[Node]:
    """Return the nodes whose raylet listens, with their devices."""
    found = []
    for node in ray.nodes():
        resources = node["Resources"]
        if node["Alive"] and _listens(node):
            gpus, memory = int(resources.get("GPU", 0)), int(resources.get("memory", 0))
            name, cpus = node["NodeID"], int(resources.get("CPU", 0))
            gpu_memory, capability = (
                (_run_on(name, what) if gpus else 0) for what in (smallest_gpu, oldest_gpu)
            )
            found.append(Node(name, cpus, gpus, memory, gpu_memory, capability=capability))
    if not found:
        raise ConfigError("the Ray cluster has no living node")
    return found


def node_addresses() -> dict[str, str]:
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}


def _listens(node: dict[str, Any]) -> bool:
    """Return whether a node may be alive: Ray lists one that was killed for more than 10 s."""
    address = node["NodeManagerAddress"], node["NodeManagerPort"]
    try:
        socket.create_connection(address, timeout=NODE_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:  # Ray decides
        return True
    return True


def preferred(node: str) -> dict[str, Any]:
    """Return options of an actor that starts on `node`, or elsewhere if it is gone.

    Ray ignores SPREAD and soft affinity for an actor that takes no resources: any node gets it.
    """
    return {
        "label_selector": {"ray.io/node-id": node},
        "fallback_strategy": [{"label_selector": {}}],
    }


def cpu_slots() -> dict[str, int]:
    """Return the CPU slots of each living node."""
    return {
        node["NodeID"]: int(node["Resources"].get("CPU", 0))
        for node in ray.nodes()
        if node["Alive"]
    }


def _run_on(node: str, what: Callable[[], int]) -> int:
    """Run a small function on a node."""
    options = {
        "num_cpus": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }
    return int(ray.get(ray.remote(what).options(**options).remote(), timeout=TASK_TIMEOUT_S))


def free_devices() -> dict[str, dict[str, float]]:
    """Return the free devices of each node."""
    per_node = ray._private.state.available_resources_per_node()
    return {
        node: {kind: amount for kind, amount in has.items() if kind in ("CPU", "GPU")}
        for node, has in per_node.items()
    }
