"""A Ray cluster of two nodes on this machine, started once. Each node has a separate raylet."""

import os
import secrets
from collections.abc import Iterator

import pytest

# Ray reads these when it is imported.
os.environ |= {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
}
pytest.importorskip("ray", reason="Ray is not installed: make test-ray")


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """Start a cluster with two nodes of two CPU slots each and yield its address."""
    from ray.cluster_utils import Cluster

    store = {"object_store_memory": 100 << 20}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, **store}
    )
    cluster.add_node(num_cpus=2, **store)
    cluster.wait_for_nodes()
    try:
        yield cluster.address
    finally:
        cluster.shutdown()
