"""Worker processes of a restarted run on Ray, started while the controller loads its libraries.

Its settings were valid before, so the processes need not wait for the checks of a start. They load
no model: the run gives them their work, or discards them if its plan has changed.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from paceline.config import RunConfig
from paceline.workers.cluster import Node, PlannedWorker
from paceline.workers.pools import plan_workers, training_roles


def start_early(config: RunConfig) -> None:
    """Start the processes that the run had at its last start."""
    from paceline.workers import ray

    def plan(nodes: Sequence[Node]) -> list[PlannedWorker]:
        # The last checkpoint has these settings too, but all of it would be read to verify it.
        recorded = Path(config.run_dir, "config.json").read_text()
        before = RunConfig.model_validate(json.loads(recorded))
        return plan_workers(before, nodes, training_roles(before))

    ray.start_early(config.ray.address, plan)
