"""Results of the calls of a reward function for one group."""

import asyncio
from collections.abc import Sequence
from typing import Any

from paceline.remote.calls import Died, Hung, Interrupted, Overdue
from paceline.reward.function import RewardFunctionError


async def scores_of(futures: Sequence[asyncio.Future[Any]]) -> list[Any]:
    """Wait for all calls of a group and return their results, or raise the most telling error."""
    if not futures:
        return []
    try:
        await asyncio.wait(futures)
    except asyncio.CancelledError:
        for future in futures:
            future.cancel()
        raise
    errors = [error for future in futures if (error := future.exception()) is not None]
    for kind in (Hung, Overdue, Died, Interrupted, RewardFunctionError):
        for error in errors:
            if isinstance(error, kind):
                raise error
    return [future.result() for future in futures]
