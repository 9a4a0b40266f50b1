"""The weight transport of a run: by the pools of trainer and engines, and by the settings."""

from collections.abc import Mapping, Sequence

from paceline.config import RunConfig
from paceline.remote.worker import Worker
from paceline.sync.connect import connect
from paceline.sync.transport import Gather, InPlace
from paceline.sync.weights import WeightTransport
from paceline.types import Role


async def open_transport(
    config: RunConfig, workers: Mapping[Role, Sequence[Worker]]
) -> WeightTransport:
    actor, engines = workers[Role.ACTOR][0], workers[Role.ROLLOUT]
    if config.in_place:
        return InPlace()
    if actor in engines:
        return Gather(actor)
    one_machine = config.cluster == "local"
    return await connect(config.sync.transport, one_machine, actor, engines, config.train.dtype)
