"""Base class of all settings: immutable, and unknown keys are errors. Each component declares its
settings in its module; `config.py` combines them."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
