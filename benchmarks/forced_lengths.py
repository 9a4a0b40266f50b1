"""Completions of predetermined lengths: all modes of a benchmark generate the same tokens."""

import math
import random
from collections.abc import Callable
from dataclasses import replace

from paceline.rollout.client import EngineClient
from paceline.types import Completion, Request


def forced_length(request_id: str, median: int, p99: int, longest: int) -> int:
    """Return a lognormal length that depends only on the trajectory."""
    seq, index, _ = request_id.split(".")
    sigma = math.log(p99 / median) / 2.326  # p99 of a lognormal is median * exp(2.326 sigma)
    length = random.Random(f"{seq}.{index}").lognormvariate(math.log(median), sigma)
    return min(longest, max(1, round(length)))


def forcing_client(length: Callable[[str], int]) -> type[EngineClient]:
    """Return an engine client whose completions have the length that `length` gives a request."""

    class ForcedLengths(EngineClient):
        async def generate(self, request: Request) -> Completion:
            most = length(request.id)
            sampling = replace(request.sampling, max_new_tokens=most, stop_token_ids=(), stop=())
            return await super().generate(replace(request, sampling=sampling))

    return ForcedLengths
