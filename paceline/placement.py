"""Settings that assign roles to resource pools. Roles in one pool time-share its devices; pools
work concurrently."""

from pydantic import Field, model_validator

from paceline.settings import Settings
from paceline.types import Role


class RaySettings(Settings):
    address: str = "local"
    """Address of the Ray cluster: host:port, "auto" for the cluster of this machine, or "local" to
    start one for this run."""


class PlacementSettings(Settings):
    actor: str = "main"
    """Pool of the model that is trained."""
    rollout: str = "main"
    """Pool of the engines that generate."""
    critic: str | None = None
    """Pool of the critic, if the algorithm has one. Default: the actor's pool."""
    ref: str | None = None
    """Pool of the frozen reference model, if the algorithm needs one. Default: the actor's pool."""
    reward: str | None = None
    """Pool of the reward model, if there is one. Default: the actor's pool, where it does not score
    while the actor trains."""
    rollout_workers: int = Field(1, ge=1)
    """Number of engines in the rollout pool."""
    train_ranks: int = Field(1, ge=1)
    """Number of processes in each pool that trains or has the reference model, if train.backend
    supports several."""
    threads: int = Field(0, ge=0)
    """CPU threads per worker. 0: the cores of the machine divided by the number of workers."""
    min_gpus: int = Field(0, ge=0)
    """Number of GPUs that must be there; with fewer, the run does not start. 0: use the GPUs there
    are, or CPUs."""
    overlap: bool = False
    """Generate during train steps if actor and rollout share a pool: on a second stream of the GPU
    (a second thread on a CPU), with a copy of the weights. If false, they alternate and share one
    set of weights. Useful only with schedule.max_staleness > 0."""

    @model_validator(mode="after")
    def _overlap_on_one_pool(self) -> "PlacementSettings":
        elsewhere = [
            f"placement.{role.value} = {self.pool(role)!r}"
            for role in Role
            if self.pool(role) != self.actor
        ]
        if self.overlap and elsewhere:
            raise ValueError(
                f"placement.overlap = true contradicts {', '.join(elsewhere)}: it is for one "
                f"device with all roles (pool {self.actor!r}); separate pools work concurrently "
                f"without it"
            )
        return self

    @model_validator(mode="after")
    def _one_engine_when_shared(self) -> "PlacementSettings":
        if self.rollout_workers > 1 and self.rollout == self.actor:
            raise ValueError(
                f"placement.rollout_workers = {self.rollout_workers} contradicts placement.rollout "
                f"= placement.actor = {self.actor!r}: a shared pool has one engine; give rollout a "
                f"separate pool or set rollout_workers = 1"
            )
        return self

    def pool(self, role: Role) -> str:
        return str(getattr(self, role.value) or self.actor)

    def shared(self, one: Role, other: Role) -> bool:
        return self.pool(one) == self.pool(other)
