"""How far generation may run ahead of training, and what a new set of weights does to running
generations.

Together with the placement this is all that tells one mode from another:

    hybrid sync, split    max_staleness 0
    one step off          max_staleness 1, on_sync drain
    fully async           max_staleness k, on_sync swap or interrupt (on one device with placement.overlap)
"""

from pydantic import AliasChoices, Field, model_validator

from paceline.settings import Settings
from paceline.types import OnSync


class ScheduleSettings(Settings):
    max_staleness: int = Field(
        0, ge=0, validation_alias=AliasChoices("max_staleness", "staleness_threshold")
    )
    """Bound on (trainer's version - oldest version among a sample's tokens) when it is taken for
    training."""
    sync_every: int = Field(1, ge=1)
    """Train steps per hand-over of weights."""
    on_sync: OnSync = OnSync.DRAIN
    """What running generations do when new weights arrive: drain, interrupt or swap."""

    @model_validator(mode="after")
    def _reachable(self) -> "ScheduleSettings":
        if self.sync_every > self.max_staleness + 1:
            raise ValueError(
                f"schedule.sync_every = {self.sync_every} contradicts schedule.max_staleness = {self.max_staleness}: "
                f"between two syncs the trainer needs sync_every batches, and only max_staleness + 1 may be under way; "
                f"set max_staleness to at least {self.sync_every - 1}, or sync_every to at most {self.max_staleness + 1}"
            )
        return self

    def capacity(self, groups_per_step: int) -> int:
        """Groups that may be outstanding (admitted, and not yet part of the weights the engines
        have).

        A group admitted at version v has at most capacity - 1 others before it, so with groups
        taken in the order of admission it is trained at version v + max_staleness at the latest.
        """
        return (self.max_staleness + 1) * groups_per_step
