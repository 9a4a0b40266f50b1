"""Worker processes of a restarted run on Ray, started while the controller loads its libraries.

Its settings were valid before, so the processes need not wait for the checks of a start. They load
no model: the run gives them their work, or discards them if its plan has changed.
"""

from collections.abc import Sequence
from pathlib import Path

from paceline.config import RunConfig
from paceline.run_dir import recorded_config
from paceline.workers.cluster import Node, PlannedWorker
from paceline.workers.pools import plan_workers, training_roles


def start_early(config: RunConfig) -> None:
    """Start the processes that the run had at its last checkpoint."""
    from paceline.workers import ray

    def plan(nodes: Sequence[Node]) -> list[PlannedWorker]:
        recorded = recorded_config(Path(config.run_dir))
        before = RunConfig.model_validate(recorded) if recorded else config
        return plan_workers(before, nodes, training_roles(before))

    ray.start_early(config.ray.address, plan)
