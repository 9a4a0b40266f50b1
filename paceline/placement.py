"""Settings that assign roles to resource pools. Roles in one pool time-share its devices; pools
work concurrently."""

from pydantic import Field, model_validator

from paceline.settings import Settings, automatic
from paceline.types import Role

TRAINED_ROLES = (Role.ACTOR, Role.CRITIC, Role.REF)  # held by all ranks of a group


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
    """Pool of the frozen reference model or teacher, if the algorithm needs one. Default: the
    actor's pool."""
    reward: str | None = None
    """Pool of the reward model, if there is one. Default: the critic's pool, or the actor's if
    there is no critic. It does not score while another role of its pool works."""
    rollout_workers: int | None = Field(None, ge=1)
    """Number of engines in the rollout pool. Default: as many as its GPUs hold
    (rollout.tensor_parallel x rollout.pipeline_parallel GPUs each); 1 without GPUs."""
    train_ranks: int | None = Field(None, ge=1)
    """Number of processes in each pool that trains or has the reference model, if train.backend
    supports several. Default: one for each GPU of the pool; without GPUs one replica of the model
    (train.tensor_parallel x train.pipeline_parallel)."""
    threads: int = automatic(0, ge=0)
    """CPU threads per process. auto or 0: the cores of the machine divided by the number of
    processes."""
    min_gpus: int = Field(0, ge=0)
    """Number of GPUs that must be there; with fewer, the run does not start. 0: use the GPUs there
    are, or CPUs."""
    overlap: bool = automatic(False)
    """Generate during train steps if actor and rollout share a pool: on a second stream of the GPU
    (a second thread on a CPU), with a copy of the weights. If false, they alternate and share one
    set of weights. Useful only with schedule.max_staleness > 0. auto: true on a GPU if
    it is possible, see docs/automatic.md."""

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
    def _no_engine_count_when_shared(self) -> "PlacementSettings":
        trains = next((r for r in TRAINED_ROLES if self.shared(r, Role.ROLLOUT)), None)
        if (self.rollout_workers or 1) > 1 and trains:
            raise ValueError(
                f"placement.rollout_workers = {self.rollout_workers} contradicts placement.rollout "
                f"= placement.{trains.value} = {self.rollout!r}: in a shared pool the ranks that "
                f"train generate; remove rollout_workers, or give rollout a separate pool"
            )
        return self

    def pool(self, role: Role) -> str:
        chosen = getattr(self, role.value) or (self.critic if role is Role.REWARD else None)
        return str(chosen or self.actor)

    def shared(self, one: Role, other: Role) -> bool:
        return self.pool(one) == self.pool(other)
