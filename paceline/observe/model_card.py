"""Model card: the README.md of a trained model, as model hubs show it."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Protocol

from paceline import __version__
from paceline.config import RunConfig
from paceline.data.prompts import RowSettings
from paceline.printable import redacted
from paceline.settings import Settings, open_settings
from paceline.training.settings import TrainSettings

MODEL_CARD = "README.md"
LIBRARY = "library_name: transformers"


class CardConfig(Protocol):
    """The settings that every card names."""

    @property
    def model(self) -> str: ...

    @property
    def run_dir(self) -> str: ...

    @property
    def train(self) -> TrainSettings: ...


def write_model_card(folder: Path, card: str) -> None:
    (folder / MODEL_CARD).write_text(card, encoding="utf-8")


def model_card(
    config: RunConfig,
    step: int,
    reward: float | None,
    evaluation: Mapping[str, Any] | None = None,
    given: Settings | None = None,
) -> str:
    """Return the card of the model after `step` train steps, the last of which got `reward`.

    `evaluation`: the last one on held-out prompts. `given`: the settings without those that
    Paceline chose for the machine. Default: `config`.
    """
    algorithm = config.algorithm.name
    facts = {
        "Algorithm": algorithm,
        "Train steps": str(step),
        "Mean reward of the last step": "unknown" if reward is None else f"{reward:.4g}",
        "Evaluation": _evaluation_text(evaluation),
        "Data": data_name(config.data),
        "Completions per prompt": str(config.group_size),
        "Prompts per step": str(config.groups_per_step),
        "Learning rate": f"{config.train.learning_rate:g}",
        "Maximum staleness": str(config.schedule.max_staleness),
    }
    if teacher := config.algorithm.teacher:
        facts["Teacher"] = Path(teacher).name if Path(teacher).expanduser().exists() else teacher
    tags = ("reinforcement-learning", algorithm)
    return card_text(config, given or config, "reinforcement learning", facts, tags)


def card_text(
    config: CardConfig, given: Settings, method: str, facts: Mapping[str, str], tags: Sequence[str]
) -> str:
    """Return the card of a model that was trained with this method and these given settings."""
    model, lora = config.model, config.train.lora
    is_public = model.count("/") == 1 and not Path(model).expanduser().exists()
    base = model if is_public else Path(model).name
    table = {"Base model": base, **facts, "Date": time.strftime("%Y-%m-%d")}
    if lora:
        table["Adapters"] = f"LoRA of rank {lora.rank}, merged into the weights"
    return "\n".join(
        [
            "---",
            LIBRARY,
            "license: unknown  # depends on the base model and the data: set it before you publish",
            *([f"base_model: {model}"] if is_public else []),
            "tags:",
            *(f"- {tag}" for tag in dict.fromkeys((*tags, "paceline"))),
            "---",
            "",
            f"# {Path(config.run_dir).name}",
            "",
            f"{base}, trained with {method} by Paceline {__version__}.",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in table.items()),
            "",
            "## Recipe",
            "",
            "All given settings that differ from their defaults:",
            "",
            "```",
            *_settings(
                given.model_dump(mode="json", exclude_defaults=True), {*open_settings(given)}
            ),
            "```",
            "",
        ]
    )


def _evaluation_text(evaluation: Mapping[str, Any] | None) -> str:
    if not evaluation:
        return "none"
    return (
        f"mean reward {evaluation['reward']:.4g} on held-out prompts at step {evaluation['step']}"
    )


def _settings(values: Mapping[str, Any], unset: Set[str], prefix: str = "") -> Iterator[str]:
    """Yield a line per setting. Directories of this machine are left out of paths."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _settings(value, unset, f"{prefix}{name}.")
        elif prefix + name != "run_dir" and prefix + name not in unset:
            yield redacted(f"{prefix}{name}={_without_directory(value)}")


def _without_directory(value: Any) -> str:
    if isinstance(value, str):
        return Path(value).name if Path(value).is_absolute() else value
    if isinstance(value, list):
        return json.dumps([_without_directory(item) for item in value])
    return json.dumps(value)


def data_name(data: RowSettings) -> str:
    """Return the built-in task or the names of the data files, without their directories."""
    paths = data.path or ()
    names = [Path(path).name for path in ([paths] if isinstance(paths, str) else paths)]
    return data.task or ", ".join(names) or "given by the program"
