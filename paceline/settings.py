"""Base class of all settings: immutable, and unknown keys are errors. Each component declares its
settings in its module; `config.py` combines them."""

from collections.abc import Iterator, Sequence
from typing import get_args

from pydantic import AliasChoices, BaseModel, ConfigDict
from pydantic.fields import FieldInfo


class Settings(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


def walk_settings(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted name and the field of every setting, also of optional sections."""
    for name, field in model.model_fields.items():
        if section := _as_section(field):
            yield from walk_settings(section, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def find_section(model: type[BaseModel], path: Sequence[str | int]) -> type[BaseModel]:
    """Return the section at a path; the path may end with the name of a setting in it."""
    for part in path:
        field = model.model_fields.get(str(part))
        model = (_as_section(field) if field else None) or model
    return model


def all_names(name: str, field: FieldInfo) -> list[str]:
    """Return the names of a setting without its section: the first, then the others."""
    alias = field.validation_alias
    own = name.rpartition(".")[2]
    others = map(str, alias.choices) if isinstance(alias, AliasChoices) else ()
    return list(dict.fromkeys([own, *others]))


def _as_section(field: FieldInfo) -> type[BaseModel] | None:
    # A section may be optional: LoraSettings | None.
    for kind in get_args(field.annotation) or (field.annotation,):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None
