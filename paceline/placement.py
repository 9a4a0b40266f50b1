"""Which role lives in which resource pool. Roles in one pool share its devices and take turns;
pools work side by side."""

from pydantic import Field, model_validator

from paceline.settings import Settings
from paceline.types import Role


class RaySettings(Settings):
    address: str = "local"
    """Where the Ray cluster is (host:port, or "auto" for the one this machine belongs to). "local":
    one of our own, for this run."""


class PlacementSettings(Settings):
    actor: str = "main"
    """Pool of the model that learns."""
    rollout: str = "main"
    """Pool of the engines that generate."""
    critic: str | None = None
    """Pool of the critic, when the algorithm has one. Unset: the actor's."""
    ref: str | None = None
    """Pool of the frozen reference model, when the algorithm needs one. Unset: the actor's."""
    reward: str | None = None
    """Pool of the reward model, when there is one. Unset: the actor's, where it waits while the
    actor trains."""
    rollout_workers: int = Field(1, ge=1)
    """Engines in the rollout pool."""
    train_ranks: int = Field(1, ge=1)
    """Processes in each pool that trains, or holds the reference model, when train.backend has
    several."""
    threads: int = Field(0, ge=0)
    """CPU threads per worker; 0 = the machine's cores divided among the workers."""
    overlap: bool = False
    """Where actor and rollout share a pool: generate while training, on a second stream of the same
    GPU (a second thread on a CPU) and with a copy of the weights. Off: they take turns on the same
    weights. Worth it with schedule.max_staleness above 0."""

    @model_validator(mode="after")
    def _overlap_on_one_pool(self) -> "PlacementSettings":
        elsewhere = [
            f"placement.{role.value} = {self.pool(role)!r}"
            for role in Role
            if self.pool(role) != self.actor
        ]
        if self.overlap and elsewhere:
            raise ValueError(
                f"placement.overlap = true contradicts {', '.join(elsewhere)}: it is for one device that has all roles "
                f"(pool {self.actor!r}); pools of their own work side by side anyway"
            )
        return self

    @model_validator(mode="after")
    def _one_engine_when_shared(self) -> "PlacementSettings":
        if self.rollout_workers > 1 and self.rollout == self.actor:
            raise ValueError(
                f"placement.rollout_workers = {self.rollout_workers} contradicts placement.rollout = placement.actor = {self.actor!r}: "
                f"on a shared pool the one engine reads the trainer's own weights; give rollout its own pool or set rollout_workers = 1"
            )
        return self

    def pool(self, role: Role) -> str:
        return str(getattr(self, role.value) or self.actor)

    def shared(self, one: Role, other: Role) -> bool:
        return self.pool(one) == self.pool(other)
