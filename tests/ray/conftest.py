"""A Ray cluster of two nodes on this machine, started once. Each node has a separate raylet."""

import os
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

# Ray reads these when it is imported.
os.environ |= {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
}
pytest.importorskip("ray", reason="Ray is not installed: make test-ray")


STORE = {"object_store_memory": 100 << 20}


@pytest.fixture(scope="session")
def cluster() -> "Iterator[Cluster]":
    """Start a cluster with two nodes of two CPU slots each."""
    from ray.cluster_utils import Cluster

    found = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, **STORE}
    )
    found.add_node(num_cpus=2, **STORE)
    found.wait_for_nodes()
    try:
        yield found
    finally:
        found.shutdown()


@pytest.fixture(scope="session")
def address(cluster: "Cluster") -> str:
    return str(cluster.address)
