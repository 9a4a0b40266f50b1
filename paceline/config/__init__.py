"""All settings of a run: a recipe plus `key=value` overrides, checked before anything starts."""

from paceline.config.base import SINKS, TRACKERS, RunSettings
from paceline.config.listing import describe_settings
from paceline.config.loading import is_setting, load_config, split_settings
from paceline.config.run import MAY_CHANGE, RunConfig, check_trainable, differences

__all__ = [
    "MAY_CHANGE",
    "SINKS",
    "TRACKERS",
    "RunConfig",
    "RunSettings",
    "check_trainable",
    "describe_settings",
    "differences",
    "is_setting",
    "load_config",
    "split_settings",
]
