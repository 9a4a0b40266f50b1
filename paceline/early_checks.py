"""Checks of names and paths in the settings that take milliseconds, before torch is imported.

A typo is reported at once. What these checks accept is checked completely when it is loaded.
"""

import difflib
import importlib.util
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from paceline.code_search import CodeNotFound, find_code
from paceline.config import TRACKERS, RunConfig
from paceline.data.files import FIRST_ROWS, find_files, first_rows
from paceline.data.prompts import DataSettings
from paceline.data.rows import check_columns
from paceline.data.tasks import BUILT_IN_MODELS, get_task
from paceline.environment.lookup import check_name
from paceline.errors import CheckpointError, ConfigError, DataError
from paceline.model.hub import check_hub_model
from paceline.model.source import model_source
from paceline.plugins import Plugin
from paceline.reward.reward import check_reward
from paceline.rollout.vllm_settings import check_vllm


def check_early(
    config: RunConfig, *, trains: bool = True, has_rows: bool = False, has_reward: bool = False
) -> None:
    """Raise PacelineError if a file, column, function or package that the settings name is missing.

    `has_rows` and `has_reward`: the program gives the prompts or the reward function itself.
    """
    _check_model(config)
    environment = config.rollout.environment
    if not has_rows and (config.data.has_origin or environment is None):
        _check_data(config.data)  # otherwise the environment may bring its own rows
    if trains and config.evaluation.path is not None:
        _check_data(config.evaluation.data(config.data), "evaluation")
    if not has_reward and (config.algorithm.uses_rewards or not trains):
        _check_reward(config)
    if environment is not None:
        check_name(environment)
    for setting, code in (
        ("data.curriculum", config.data.curriculum),
        *_plugins(config),
    ):
        if code is not None:
            check_code(setting, str(code))
    if config.rollout.engine == "vllm":
        check_vllm()
    _check_package("rollout.agent", config.rollout.agent is not None, "aiohttp", "agents")
    _check_package("reward.judge", config.reward.judge is not None, "aiohttp", "agents")
    if trains:
        _check_packages(config)
        _check_run_dir(Path(config.run_dir))


def _plugins(settings: BaseModel, prefix: str = "") -> Iterator[tuple[str, Plugin]]:
    """Yield every setting that names user code."""
    for name, value in settings:
        if isinstance(value, BaseModel):
            yield from _plugins(value, f"{prefix}{name}.")
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Plugin):
                yield f"{prefix}{name}", item


def _check_model(config: RunConfig) -> None:
    for setting, model in (
        ("model", config.model),
        ("algorithm.teacher", config.algorithm.teacher),
    ):
        if model is not None:
            check_model_name(model, setting)
    if (scorer := config.reward.model) not in (None, "tiny"):
        check_hub_model(model_source(scorer, "reward.model"), "reward.model")


def check_model_name(model: str, setting: str = "model") -> None:
    """Raise PacelineError if there is no such directory, hub model or built-in model."""
    name, _, task = model.partition(":")
    if name not in BUILT_IN_MODELS:
        check_hub_model(model_source(model, setting), setting)
    elif task:
        get_task(task)


def check_given_rows(
    data: DataSettings, rows: Iterable[Any], argument: str, section: str = "data"
) -> None:
    """Raise DataError if rows that a program gives as `argument` lack a column of the settings."""
    if data.on_bad_row == "fail":
        found = first_given_rows(rows, data.limit)
        _check_columns(data, found, f"the rows given as {argument}", section)


def first_given_rows(rows: Any, limit: int | None = None) -> list[Mapping[str, Any]]:
    """Return some rows from the start of a sequence; none of an iterator, which would lose them."""
    is_sequence = hasattr(rows, "__len__") and hasattr(rows, "__getitem__")
    if not is_sequence or isinstance(rows, Mapping):
        return []
    try:
        first = list(islice(rows, min(limit or FIRST_ROWS, FIRST_ROWS)))
    except Exception:  # reported when all rows are read
        return []
    return [row for row in first if isinstance(row, Mapping)]


def _check_data(data: DataSettings, section: str = "data") -> None:
    if not data.has_origin:
        raise ConfigError(
            "there are no prompts: set data.task (for example 'sort:5') "
            "or data.path (for example 'prompts.jsonl')"
        )
    if data.path is None:
        return
    files = find_files((data.path,) if isinstance(data.path, str) else data.path)
    if data.on_bad_row == "fail":  # otherwise the first rows may be bad and others good
        rows = [read.row for read in first_rows(files[0])]
        _check_columns(data, rows, str(files[0]), section)


def _check_columns(
    data: DataSettings, rows: Sequence[Mapping[str, Any]], origin: str, section: str
) -> None:
    check_columns(rows, origin, data.prompt_key, section)
    columns = {name: None for row in rows for name in row}
    name = data.answer_key
    if name and columns and not {name, name.partition(".")[0]} & columns.keys():
        names = [*map(str, columns)]
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        other = "" if section == "data" else f". Set {section}.answer_key for these rows"
        raise DataError(
            f"data.answer_key = {name!r}: no such column in {origin}; "
            f"columns found: {', '.join(names)}{hint}{other}"
        )


def _check_reward(config: RunConfig) -> None:
    reward = config.reward
    rollout = config.rollout
    given = reward.function or reward.model or config.data.task
    if not given and rollout.environment is None and rollout.agent is None:
        raise ConfigError(
            "prompts from data.path need a reward: set reward.function to 'file.py:function', "
            "'module:function' or a verifier (for example 'last_number'), or set reward.model"
        )
    check_reward(reward)


def check_code(setting: str, spec: str) -> None:
    """Raise ConfigError if "file.py:name" or "module:name" names nothing. Imports no user code.

    Names without a colon are built in or entry points, which are checked where they are declared.
    """
    try:
        if ":" in spec:
            find_code(spec)
    except CodeNotFound as problem:
        raise ConfigError(f"{setting} = {spec!r}: {problem}") from None


def _check_packages(config: RunConfig) -> None:
    tracked = set(map(str, config.track))
    needed = (
        ("cluster = 'ray'", config.cluster == "ray", "ray", "ray"),
        ("train.backend = 'megatron'", config.train.backend == "megatron", "megatron", "megatron"),
        ("train.lora", config.train.lora is not None, "peft", "lora"),
        *((f"track = {name!r}", True, name, name) for name in TRACKERS if name in tracked),
    )
    for setting, used, package, extra in needed:
        _check_package(setting, used, package, extra)


def _check_package(setting: str, used: bool, package: str, extra: str) -> None:
    if used and importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{setting}: the package {package} is not installed; "
            f"run pip install 'paceline[{extra}]'"
        )


def _check_run_dir(folder: Path) -> None:
    try:
        paths = (folder, *folder.absolute().parents)
        existing = next(path for path in paths if path.exists() or path.is_symlink())
    except OSError as error:  # a name that is too long
        raise CheckpointError(
            f"run_dir = {folder} cannot be used: {error.strerror}; expected a writable directory"
        ) from None
    problem = "is not a directory" if not existing.is_dir() else "is not writable"
    if not existing.exists():
        problem = f"is a link to {os.readlink(existing)}, which does not exist"
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise CheckpointError(
            f"run_dir = {folder} cannot be used: {existing} {problem}; "
            "expected a writable directory"
        )
