"""Game: find a number. Every guess is answered with what is left, for example "higher, 6-9=".

The number is part of the row, so the same row is the same game. A turn that finds the number has
the reward 1, less 0.2 for every guess before it, and at least 0.2. A wrong guess that was still
possible has the reward 0.1, so up to the fifth guess a game is worth more the earlier it ends.
"""

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.environment.protocol import Message, Reply

POSSIBLE, LATER = 0.1, 0.2
_NUMBER = re.compile(r"\d{1,9}")


class Guess:
    def __init__(self, highest: int = 9, size: int = 4096) -> None:
        self._low, self._high, self._guesses = 1, highest, 0

    @staticmethod
    def rows(seed: int, highest: int = 9, size: int = 4096) -> list[dict[str, Any]]:
        """Return games with numbers from 1 to `highest`."""
        numbers = random.Random(f"guess/{seed}")
        prompt = f"guess 1-{highest}="
        return [{"prompt": prompt, "number": numbers.randint(1, highest)} for _ in range(size)]

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Message] | None:
        self._number = int(row["number"])
        return None

    async def step(self, message: Message) -> Reply:
        found = _NUMBER.findall(message["content"])
        guess = int(found[-1]) if found else None
        if guess == self._number:
            return Reply(reward=max(LATER, 1 - LATER * self._guesses), done=True)
        self._guesses += 1
        if guess is None or not self._low <= guess <= self._high:
            return Reply(self._left("again"))
        if guess < self._number:
            self._low = guess + 1
            return Reply(self._left("higher"), POSSIBLE)
        self._high = guess - 1
        return Reply(self._left("lower"), POSSIBLE)

    def _left(self, hint: str) -> str:
        return f"{hint}, {self._low}-{self._high}="
