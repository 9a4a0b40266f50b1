"""Asynchronous reinforcement learning for language models.

`import paceline` does not import torch: large dependencies are imported where they are used.
"""

import os

# The threads of a matmul wait for each other by spinning, by default for milliseconds. While
# another program uses the cores, each of the fifty matmuls of a decode step then costs a time slice
# of the scheduler. A short spin makes an idle machine 3 % slower and a busy one several times
# faster. GNU OpenMP reads the variable when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

__version__ = "0.1.0"
