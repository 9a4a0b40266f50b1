"""TRL's names for GRPO: `from paceline.trl import GRPOConfig, GRPOTrainer`.

A script written for TRL runs with only its imports changed. TRL itself is not needed, and importing
this package loads neither torch nor transformers.
"""

from paceline.trl.config import GRPOConfig
from paceline.trl.trainer import GRPOTrainer
from paceline.trl.unsupported import NAMES as _NAMES

__all__ = ["GRPOConfig", "GRPOTrainer"]


def __getattr__(name: str) -> object:
    if name in _NAMES:
        # An AttributeError would lose its text in `from paceline.trl import ...`.
        raise ImportError(f"paceline.trl has no {name}; {_NAMES[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
