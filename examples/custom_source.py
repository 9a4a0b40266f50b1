"""Custom prompt source: an endless stream of rows that a program makes.

paceline train recipes/hybrid.toml data.source=examples/custom_source.py:words reward.function=exact
"""

import random
from collections.abc import Iterator


def words(seed: int) -> Iterator[dict[str, str]]:
    """Yield rows. A list instead of a generator is a dataset, which is shuffled in each epoch."""
    rng = random.Random(seed)
    while True:
        word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=5))
        yield {"prompt": f"reverse {word}=", "answer": word[::-1]}
