"""Which role lives in which resource pool. Roles in one pool share its devices and take turns; pools work side by side."""

from pydantic import Field, model_validator

from paceline.settings import Settings
from paceline.types import Role


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
    """Pool of the reward model, when there is one. Unset: the actor's, where it waits while the actor trains."""
    rollout_workers: int = Field(1, ge=1)
    """Engines in the rollout pool."""
    train_ranks: int = Field(1, ge=1)
    """Processes in each pool that trains, or holds the reference model, when train.backend has several."""
    threads: int = Field(0, ge=0)
    """CPU threads per worker; 0 = the machine's cores divided among the workers."""

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
