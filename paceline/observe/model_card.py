"""Model card: the README.md of a trained model, as model hubs show it."""

import time
from pathlib import Path

from paceline import __version__
from paceline.config import RunConfig

MODEL_CARD = "README.md"
LIBRARY = "library_name: transformers"


def write_model_card(folder: Path, config: RunConfig, step: int, reward: float | None) -> None:
    """Write the card of the model after `step` train steps, the last of which got `reward`."""
    (folder / MODEL_CARD).write_text(model_card(config, step, reward), encoding="utf-8")


def model_card(config: RunConfig, step: int, reward: float | None) -> str:
    algorithm, model = config.algorithm.name, config.model
    is_public = model.count("/") == 1 and not Path(model).expanduser().exists()
    facts = {
        "Base model": model if is_public else Path(model).name,
        "Algorithm": algorithm,
        "Train steps": str(step),
        "Mean reward of the last step": "unknown" if reward is None else f"{reward:.4g}",
        "Data": _data(config),
        "Completions per prompt": str(config.group_size),
        "Prompts per step": str(config.groups_per_step),
        "Learning rate": f"{config.train.learning_rate:g}",
        "Maximum staleness": str(config.schedule.max_staleness),
        "Date": time.strftime("%Y-%m-%d"),
    }
    if teacher := config.algorithm.teacher:
        facts["Teacher"] = Path(teacher).name if Path(teacher).expanduser().exists() else teacher
    if config.train.lora:
        facts["Adapters"] = f"LoRA of rank {config.train.lora.rank}, merged into the weights"
    tags = dict.fromkeys(("reinforcement-learning", algorithm, "paceline"))
    return "\n".join(
        [
            "---",
            LIBRARY,
            *([f"base_model: {model}"] if is_public else []),
            "tags:",
            *(f"- {tag}" for tag in tags),
            "---",
            "",
            f"# {Path(config.run_dir).name}",
            "",
            f"{facts['Base model']}, trained with reinforcement learning by Paceline "
            f"{__version__}.",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in facts.items()),
            "",
        ]
    )


def _data(config: RunConfig) -> str:
    """Return the built-in task or the names of the data files, without their directories."""
    paths = config.data.path or ()
    names = [Path(path).name for path in ([paths] if isinstance(paths, str) else paths)]
    return config.data.task or ", ".join(names) or "given by the program"
