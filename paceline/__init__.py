"""Paceline: asynchronous reinforcement learning for language models.

`import paceline` loads no torch: heavy parts are imported where they are used.
"""

import os

# Threads of a matrix product wait for each other by spinning, by default for milliseconds: beside
# another busy program each of a decode step's fifty products then costs a scheduler's turn. Read by
# GNU OpenMP when torch is first imported. Spinning shortly gives 3 % less on a quiet machine and
# several times as much on a busy one.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

__version__ = "0.1.0"
