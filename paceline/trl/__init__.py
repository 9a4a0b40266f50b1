"""TRL's names for GRPO: `from paceline.trl import GRPOConfig, GRPOTrainer`.

A script written for TRL runs with only its imports changed. TRL itself is not needed, and importing
this package loads neither torch nor transformers.
"""

from paceline.trl.config import GRPOConfig
from paceline.trl.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]
