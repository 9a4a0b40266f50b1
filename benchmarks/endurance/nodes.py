"""A Ray cluster of two nodes on this machine. The second node can be killed and is replaced."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

STORE = {"object_store_memory": 100 << 20}


class Nodes:
    def __init__(self, temporary: Path) -> None:
        # Ray reads these when it is imported.
        os.environ |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        from ray._common.utils import get_default_ray_temp_dir
        from ray.cluster_utils import Cluster

        # Ray writes the address of the cluster there, and creates only the directory given below.
        Path(get_default_ray_temp_dir()).mkdir(parents=True, exist_ok=True)
        head: dict[str, Any] = {"num_cpus": 2, "include_dashboard": False, **STORE}
        self._cluster = Cluster(
            initialize_head=True, head_node_args=head | {"temp_dir": str(temporary)}
        )
        self._second = self._cluster.add_node(num_cpus=2, **STORE)
        self._cluster.wait_for_nodes()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def raylets(self) -> list[int]:
        """Return the process of the second node, which has no driver."""
        found = self._second.all_processes.get("raylet", [])
        return [one.process.pid for one in found if one.process.poll() is None]

    def replace(self) -> None:
        """Start another node if the second one was killed."""
        if not self.raylets():
            self._cluster.remove_node(self._second, allow_graceful=False)
            self._second = self._cluster.add_node(num_cpus=2, **STORE)

    def workers(self) -> list[int]:
        """Return the actors of Paceline that run in this cluster."""
        below = psutil.Process().children(recursive=True)
        return [one.pid for one in below if "RayHost" in " ".join(one.cmdline())]

    def close(self) -> None:
        self._cluster.shutdown()


@contextmanager
def two_nodes(temporary: Path) -> Iterator[Nodes]:
    nodes = Nodes(temporary)
    try:
        yield nodes
    finally:
        nodes.close()
