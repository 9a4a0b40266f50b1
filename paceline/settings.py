"""Base class of all settings: immutable, and unknown keys are errors. Each component declares its
settings in its module; `config/` combines them.

An automatic setting is chosen for devices, model and load at the start of a run
(workers/automatic.py), unless it is set. "auto" leaves it unset.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo

AUTO = "auto"
SettingsT = TypeVar("SettingsT", bound=BaseModel)


def automatic(fallback: Any, **limits: Any) -> Any:
    """Return the field of an automatic setting.

    `fallback`: its value until it is chosen, for parts that are built without a run.
    """
    return Field(fallback, json_schema_extra={AUTO: True}, **limits)


class Settings(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _auto_is_unset(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        unset = {name for name, value in values.items() if isinstance(value, str) and value == AUTO}
        unset = {name for name in unset if is_automatic(cls.model_fields.get(name))}
        return {name: value for name, value in values.items() if name not in unset}

    @model_serializer(mode="wrap")
    def _unset_is_auto(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = serialize(self)
        return values | dict.fromkeys(self._open_names(), AUTO)

    def _open_names(self) -> Iterator[str]:
        for name, field in type(self).model_fields.items():
            if is_automatic(field) and name not in self.model_fields_set:
                yield name


def is_automatic(field: FieldInfo | None) -> bool:
    extra = field.json_schema_extra if field else None
    return isinstance(extra, Mapping) and AUTO in extra


def open_settings(settings: Settings, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of automatic settings that are not set."""
    yield from (f"{prefix}{name}" for name in settings._open_names())
    for name, value in settings:
        if isinstance(value, Settings):
            yield from open_settings(value, f"{prefix}{name}.")


def with_settings(settings: SettingsT, values: Mapping[str, Any]) -> SettingsT:
    """Return a copy in which these settings, by dotted name, are set. Values are not checked."""
    sections: dict[str, dict[str, Any]] = {}
    changes: dict[str, Any] = {}
    for name, value in values.items():
        section, _, rest = name.partition(".")
        if rest:
            sections.setdefault(section, {})[rest] = value
        else:
            changes[name] = value
    for section, inner in sections.items():
        changes[section] = with_settings(getattr(settings, section), inner)
    return settings.model_copy(update=changes)


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
