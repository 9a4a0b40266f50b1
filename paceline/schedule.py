"""How far generation may run ahead of training, and what new weights do to running generations.

Modes differ only in these settings and the placement:

    hybrid sync, split    max_staleness 0
    one step off          max_staleness 1, on_sync drain
    fully async           max_staleness k, on_sync swap or interrupt; on one device also
                          placement.overlap
"""

from pydantic import AliasChoices, Field, model_validator

from paceline.settings import Settings
from paceline.types import OnSync


class ScheduleSettings(Settings):
    max_staleness: int = Field(
        0, ge=0, validation_alias=AliasChoices("max_staleness", "staleness_threshold")
    )
    """Maximum staleness of a sample when it is trained: the trainer's version minus the oldest
    version among the sample's tokens."""
    sync_every: int = Field(1, ge=1)
    """Train steps per weight sync."""
    on_sync: OnSync = OnSync.DRAIN
    """What running generations do when new weights arrive: drain (finish on the old weights),
    interrupt (resume on the new weights with a new KV cache) or swap (keep the KV cache)."""

    @model_validator(mode="after")
    def _reachable(self) -> "ScheduleSettings":
        if self.sync_every > self.max_staleness + 1:
            raise ValueError(
                f"schedule.sync_every = {self.sync_every} contradicts schedule.max_staleness = "
                f"{self.max_staleness}: between two syncs the trainer needs sync_every batches, "
                f"and at most max_staleness + 1 may be in flight; set max_staleness to at least "
                f"{self.sync_every - 1}, or sync_every to at most {self.max_staleness + 1}"
            )
        return self

    def capacity(self, groups_per_step: int) -> int:
        """Return how many groups may be outstanding: admitted, and not yet trained into the weights
        that the engines have.

        At most capacity - 1 groups precede a group admitted at version v. Groups are trained in the
        order of admission, so it is trained at version v + max_staleness at the latest.
        """
        return (self.max_staleness + 1) * groups_per_step
