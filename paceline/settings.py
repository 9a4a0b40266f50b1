"""What all settings share: frozen, unknown keys refused. Each component declares its own settings
beside itself; `config.py` puts them together."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
