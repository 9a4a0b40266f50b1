"""The model, tokenizer and adapters that a TRL script passes as objects.

Paceline reads models from directories, because its workers are separate processes.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Fields of LoraConfig that are translated, or that only describe the adapter.
LORA = {"r", "lora_alpha", "target_modules", "task_type", "peft_type", "inference_mode"}
LORA |= {"base_model_name_or_path", "auto_mapping", "peft_version", "revision"}


def model_name(model: Any) -> str:
    """Return the last part of the model's ID or path."""
    name = model if isinstance(model, str | Path) else getattr(model, "name_or_path", "") or "model"
    return str(name).rstrip("/").split("/")[-1]


def model_directory(model: Any, tokenizer: Any, target: Path) -> str:
    """Return the ID or directory of the model; save a loaded model to `target` first."""
    if isinstance(model, str | Path):
        if tokenizer is not None:
            _check_tokenizer(str(model), tokenizer)
        return str(model)
    if hasattr(model, "peft_config"):
        raise ConfigError(
            "model is a PeftModel, whose adapters Paceline does not continue; pass the base model "
            "and peft_config, or pass model.merge_and_unload()"
        )
    if not hasattr(model, "save_pretrained"):
        raise ConfigError(
            f"model is {type(model).__name__}; expected a Hugging Face model ID, a directory or a "
            "causal language model of transformers"
        )
    if tokenizer is None:
        from paceline.model.loading import load_tokenizer

        tokenizer = load_tokenizer(model.name_or_path)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return str(target)


def _check_tokenizer(model: str, tokenizer: Any) -> None:
    from paceline.model.loading import load_tokenizer

    given = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    if not hasattr(given, "get_vocab"):
        raise ConfigError(
            f"processing_class is {type(given).__name__}; expected a tokenizer of transformers, or "
            "leave it out: Paceline reads the tokenizer from the model's directory"
        )
    own = load_tokenizer(model)
    for what, same in (
        ("another vocabulary", given.get_vocab() == own.get_vocab()),
        ("another chat template", given.chat_template == own.chat_template),
        ("another end-of-sequence token", given.eos_token == own.eos_token),
    ):
        if not same:
            raise ConfigError(
                f"processing_class has {what} than the tokenizer of model = {model!r}, and "
                "Paceline reads the tokenizer from the model's directory; save both to one "
                "directory with save_pretrained, or pass the loaded model"
            )


def longest_prompt(tokenizer: "PreTrainedTokenizerBase", rows: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of tokens of the longest prompt. TRL itself has no limit.

    Rows that cannot be used do not count: the run reports them.
    """
    from paceline.data.files import ParsedRow
    from paceline.data.prompts import DataSettings
    from paceline.data.rows import RowTokenizer, TokenizedRow

    settings = DataSettings(chat=uses_chat(rows), max_prompt_length=sys.maxsize)
    found = RowTokenizer(settings, tokenizer).tokenize([ParsedRow("", row) for row in rows])
    return max((len(row.tokens) for row in found if isinstance(row, TokenizedRow)), default=1)


def uses_chat(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether prompts are chat messages."""
    return isinstance(rows[0]["prompt"], Sequence) and not isinstance(rows[0]["prompt"], str)


def lora_settings(config: Any) -> dict[str, Any]:
    """Return the settings of a peft.LoraConfig; raise ConfigError for what it cannot honor."""
    if type(config).__name__ != "LoraConfig":
        raise ConfigError(
            f"peft_config is {type(config).__name__}; expected a peft.LoraConfig: only LoRA "
            "adapters can be trained"
        )
    defaults = type(config)().to_dict()
    for name, value in config.to_dict().items():
        if name not in LORA and value != defaults.get(name):
            raise ConfigError(
                f"peft_config: {name} = {value!r} cannot be honored; LoRA here has rank, alpha and "
                "target modules, and no dropout, because training must compute the policy that "
                f"sampled. Leave {name} at {defaults.get(name)!r}"
            )
    if config.lora_alpha != int(config.lora_alpha) or config.lora_alpha < 1:
        raise ConfigError(
            f"peft_config: lora_alpha = {config.lora_alpha!r}; expected a whole number, at least 1"
        )
    targets = config.target_modules
    if isinstance(targets, str) and targets != "all-linear":
        raise ConfigError(
            f"peft_config: target_modules = {targets!r} is a pattern; expected a list of names"
        )
    named = () if targets is None or isinstance(targets, str) else tuple(sorted(targets))
    return {
        "train.lora.rank": config.r,
        "train.lora.alpha": int(config.lora_alpha),
        "train.lora.targets": named,
    }
