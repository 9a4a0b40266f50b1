"""Custom prompt source: an endless stream of rows that a program makes.

paceline train recipes/hybrid.toml data.source=examples/custom_source.py:rows reward.function=exact
"""

import random
from collections.abc import Iterator


def rows(seed: int) -> Iterator[dict[str, str]]:
    """Yield rows. A list instead of a generator is a dataset, which is shuffled in each epoch."""
    rng = random.Random(seed)
    while True:
        digits = "".join(rng.choices("0123456789", k=5))
        yield {"prompt": f"reverse {digits}=", "answer": digits[::-1]}
