"""The workers that stand for rollout engines."""

from collections.abc import Sequence

from paceline.config import RunConfig
from paceline.remote.group import ranks_of
from paceline.remote.worker import Worker
from paceline.types import Role
from paceline.workers.build import first_rank_only
from paceline.workers.cluster import PlannedWorker


def engine_workers(
    config: RunConfig, plans: Sequence[PlannedWorker], workers: Sequence[Worker]
) -> list[Worker]:
    """Return the worker to call for each engine: a whole worker, or a rank of a trainer.

    In a trainer, each `rollout.ranks` ranks are one engine; its first rank is called.
    """
    roles = {plan.name: plan.roles for plan in plans}
    found: list[Worker] = []
    for worker in workers:
        if Role.ROLLOUT in first_rank_only(roles[worker.name]):
            found.append(worker)
        else:
            found += ranks_of(worker)[:: config.rollout.ranks]
    return found
