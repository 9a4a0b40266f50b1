"""Paceline: asynchronous reinforcement learning for language models.

`import paceline` loads no torch: heavy parts are imported where they are used.
"""

__version__ = "0.1.0"
