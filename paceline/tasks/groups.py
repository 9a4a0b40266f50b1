"""What becomes of every group: it is trained once, or dropped for a named reason."""

import logging
from collections import Counter
from collections.abc import Sequence

from paceline.errors import LedgerError, PacelineError, RewardError, RolloutError
from paceline.queue.message_queue import DropReason, Item
from paceline.tasks.parts import Parts
from paceline.types import Group

log = logging.getLogger(__name__)

# Batches of groups that dynamic sampling may filter in a row before the run fails.
FILTERED_IN_A_ROW = 50
UPDATE_SKIPPED = "update_skipped"  # reason of a drop


class GroupAccounts:
    """Tells ledger, admission and timeline what became of a group."""

    def __init__(self, parts: Parts) -> None:
        self.failed = 0
        self._settings, self._timeline, self._seen = parts.settings, parts.timeline, parts.seen
        self._ledger, self._admission = parts.ledger, parts.admission
        self._queue = parts.queue.queue
        # Rewards of the groups that were filtered since the last step.
        self._uniform: Counter[str] = Counter()
        self._queue.on_drop = self._left_queue

    @property
    def skipped(self) -> int:
        """Number of groups whose update was skipped."""
        return self._ledger.dropped[UPDATE_SKIPPED]

    def trained(self, groups: Sequence[Group], staleness: Sequence[int], step: int) -> None:
        """Record the groups of a train step, made with the weights of `step`."""
        for group, stale in zip(groups, staleness, strict=True):
            self._timeline.group("group", group.seq, None)
            self._ledger.trained(group.seq, uid=group.prompt.uid, step=step, staleness=stale)
        self._uniform.clear()

    def drop(self, seq: int, reason: str, details: str = "", group: Group | None = None) -> None:
        """Drop a group. `group`: if it was generated."""
        self._ledger.drop(seq, reason, details)
        if group is not None:
            self._seen("dropped", group)
        self._admission.drop(seq)
        self._timeline.dropped(seq, reason, group.num_tokens if group is not None else 0)

    def drop_failed(self, seq: int, error: PacelineError) -> None:
        """Drop a group that failed; raise if too many have."""
        self.failed += 1
        reason = "reward_failed" if isinstance(error, RewardError) else "rollout_failed"
        self.drop(seq, reason, str(error))
        log.warning("group %d failed and is dropped: %s", seq, error)
        limit = self._settings.max_failed_groups
        if self.failed > limit:
            error.add_note(f"{self.failed} group(s) failed; rollout.max_failed_groups = {limit}")
            raise error

    def drop_uniform(self, group: Group, step: int) -> None:
        """Drop a group with equal rewards, which has no advantage; another one replaces it."""
        self.drop(group.seq, "equal_rewards", group=group)
        rewards = {trajectory.total_reward for trajectory in group.trajectories}  # of each agent
        self._uniform[", ".join(f"{reward:g}" for reward in sorted(rewards))] += 1
        if self._uniform.total() > FILTERED_IN_A_ROW * self._settings.groups_per_step:
            seen = ", ".join(
                f"{count} with reward {reward}" for reward, count in self._uniform.most_common(5)
            )
            raise RolloutError(
                f"{self._uniform.total()} groups in a row had equal rewards ({seen}), so dynamic "
                f"sampling cannot fill step {step}: the task is too hard or too easy, or "
                "the reward does not distinguish completions"
            )

    def drop_skipped(self, groups: Sequence[Group], step: int) -> None:
        """Drop the groups of a skipped update."""
        for group in groups:
            self.drop(group.seq, UPDATE_SKIPPED, f"step {step}", group)
        self._ledger.flush()

    def _left_queue(self, item: Item, reason: DropReason) -> None:
        if reason is DropReason.FUTURE:
            raise LedgerError(
                f"group {item.key} has version {item.param_version}, newer than the trainer's "
                f"{self._queue.version}"
            )
        self.drop(int(item.key), reason.value, group=item.payload)
