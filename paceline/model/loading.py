"""Loading of models and tokenizers: a local directory, a Hugging Face model ID, or a GGUF file.

Every failure is a ModelError that says what was looked for and where.
"""

import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers import modeling_gguf_pytorch_utils as gguf
from transformers.utils import logging as hf_logging

from paceline.errors import ModelError
from paceline.model.cache import sampled_bytes
from paceline.model.creation import CREATING
from paceline.model.source import ModelFiles, model_files, model_source

log = logging.getLogger(__name__)

TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "spiece*")
# Mean relative difference of log-probs from a plain forward pass: in float32 and in bfloat16.
EXACT, ROUNDED = 1e-4, 0.05
# What to do if a model cannot be loaded, by a part of the error of transformers.
ACTIONS = {
    "custom code": "Paceline runs no custom code; use a model that transformers itself supports",
    "does not recognize this architecture": "update transformers, or use another model",
    "quantiz": "use the model without quantization",
}


def load_model(
    name: str, dtype: str = "float32", kind: Any = AutoModelForCausalLM
) -> PreTrainedModel:
    """Load a model in evaluation mode without dropout. `kind`: an auto class of transformers."""
    source = model_source(name)
    files, config = model_files(source), load_config(source)
    number = getattr(torch, dtype, None)
    if not isinstance(number, torch.dtype) or not number.is_floating_point:
        raise ModelError(
            f"dtype {dtype!r} is not a floating-point dtype; use 'float32' or 'bfloat16'"
        )
    options = {"config": config, "dtype": number, "output_loading_info": True, **files.options}
    options["ignore_mismatched_sizes"] = True  # its error names no tensor; see _check_loaded
    if files.gguf and hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model, info = _load(files, lambda: kind.from_pretrained(files.name, **options))
    if files.gguf:
        _forget_quantization(model)
    _check_loaded(source, info)
    if kind is AutoModelForCausalLM and info["unexpected_keys"]:
        _warn_unused(source, len(info["unexpected_keys"]), min(info["unexpected_keys"]))
    if kind is AutoModelForCausalLM:
        _correct_ties(model)
    model.eval()
    return model


def _correct_ties(model: PreTrainedModel) -> None:
    """Set the config to untied if the files have an output layer that is not the embedding.

    transformers keeps both then, whatever the config says, and a checkpoint must have both.
    """
    output, text = model.get_output_embeddings(), model.config.get_text_config()
    own = getattr(output, "weight", None)
    if own is not None and own is not model.get_input_embeddings().weight:
        for config in (model.config, text):
            if getattr(config, "tie_word_embeddings", False):
                config.tie_word_embeddings = False


def _check_loaded(source: str, info: Mapping[str, Any]) -> None:
    """Raise ModelError if weights are missing or do not have the shapes of the config."""
    if info["mismatched_keys"]:
        name, stored, expected = min(info["mismatched_keys"])
        raise ModelError(
            f"{source}: {len(info['mismatched_keys'])} weights do not have the shapes that "
            f"config.json asks for, for example {name!r}: stored {tuple(stored)}, expected "
            f"{tuple(expected)}; use the config.json that belongs to the weights"
        )
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ModelError(
            f"{source}: {len(missing)} weights are missing, for example {missing[0]!r}; "
            "the download may be incomplete, so download the model again"
        )


@lru_cache  # once per process, which may load a model several times
def _warn_unused(source: str, count: int, example: str) -> None:
    log.warning(
        "%s: the model does not use %d of the stored weights, for example %r; if they are layers, "
        "config.json does not belong to the weights",
        *(source, count, example),
    )


def load_config(name: str) -> PretrainedConfig:
    """Load the configuration; a directory needs no weights for it."""
    folder = Path(os.path.expanduser(name))  # Path.expanduser fails if there is no such user
    has_config = (folder / "config.json").is_file()
    files = model_files(str(folder) if has_config else model_source(name))
    config = (
        deepcopy(_gguf_config(files, files.weights[0].stat().st_mtime_ns))
        if files.gguf
        else _read_config(files)
    )
    for key, value in config.to_dict().items():
        # The trainer's log-probs must match the engine's, so the model must be deterministic.
        if isinstance(value, float) and ("dropout" in key or key.endswith(("_pdrop", "_drop"))):
            setattr(config, key, 0.0)
    return config


def model_body(model: PreTrainedModel) -> Any:
    """Return the part that computes hidden states, without the output layer."""
    if model.base_model is not model or model.get_output_embeddings() is None:
        return model.base_model
    # Some models store their body under another name than `base_model_prefix` says.
    return next(part for part in model.children() if isinstance(part, PreTrainedModel))


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> list[Path]:
    """Write the tokenizer's files. A full disk is an OSError, as with all other files."""
    try:
        return [Path(path) for path in tokenizer.save_pretrained(folder)]
    except Exception as error:  # the library tokenizers raises Exception("... (os error 28)")
        if not (number := re.search(r"\(os error (\d+)\)", str(error))):
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(folder / "tokenizer.json")) from error


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    source = model_source(name)
    files, folder = model_files(source), Path(source)
    missing = ModelError(
        f"{source} has no tokenizer; add the model's tokenizer files (tokenizer.json, "
        "tokenizer_config.json)"
    )
    has_files = files.gguf or any(any(folder.glob(pattern)) for pattern in TOKENIZERS)
    if files.is_local and not has_files:
        raise missing
    tokenizer: PreTrainedTokenizerBase = _load(
        files, lambda: AutoTokenizer.from_pretrained(files.name, **files.options)
    )
    if tokenizer.get_vocab().keys() <= set(
        tokenizer.all_special_tokens
    ):  # what transformers makes up when the files are not there
        raise missing
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


class TokenizerFiles:
    """The files of a tokenizer. They are made once: it takes tenths of a second."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._files: dict[str, bytes] = {}

    def write(self, folder: Path) -> None:
        if not self._files:
            made = save_tokenizer(self._tokenizer, folder)
            # Named chat templates are in a subdirectory.
            self._files = {str(path.relative_to(folder)): path.read_bytes() for path in made}
            return
        for name, content in self._files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)


def load_generation_config(name: str) -> GenerationConfig:
    """Load the generation config, or derive it from the model's config. It lists the end tokens."""
    source = model_source(name)
    file = Path(source, "generation_config.json")
    try:
        if not Path(source).is_file():  # files next to a GGUF file may belong to another model
            return GenerationConfig.from_pretrained(source)
    except (OSError, TypeError, ValueError) as error:
        if file.is_file():
            raise ModelError(
                f"cannot read {file}: {str(error).rstrip('.')}; correct the file, download it "
                "again, or remove it to use the end tokens of config.json"
            ) from error
    return GenerationConfig.from_model_config(load_config(source))


def model_fingerprint(name: str) -> str:
    """Return a hash of the config and of the size and sampled bytes of every weight file."""
    source = model_source(name)
    digest = hashlib.sha256(load_config(source).to_json_string().encode())
    files = model_files(source)
    if not files.is_local:
        digest.update(str(getattr(load_config(source), "_commit_hash", "")).encode())
    for file in files.weights:
        digest.update(f"{file.name}/{file.stat().st_size}".encode())
        for part in sampled_bytes(file):
            digest.update(part)
    return digest.hexdigest()


def _read_config(files: ModelFiles) -> PretrainedConfig:
    config: PretrainedConfig = _load(
        files, lambda: AutoConfig.from_pretrained(files.name, **files.options)
    )
    return config


@lru_cache(maxsize=4)
def _gguf_config(files: ModelFiles, changed_ns: int) -> PretrainedConfig:
    """Cache the config: transformers reads the whole vocabulary for it, which takes seconds."""
    return _read_config(files)


def _forget_quantization(model: PreTrainedModel) -> None:
    """Clear the quantization marks of a dequantized model, or transformers would not cast it."""
    model.is_quantized = False
    for owner, name in (
        (model, "hf_quantizer"),
        (model, "quantization_method"),
        (model.config, "quantization_config"),
    ):
        if hasattr(owner, name):
            delattr(owner, name)


def _load(files: ModelFiles, load: Callable[[], Any]) -> Any:
    try:
        with CREATING, no_progress_bars() if files.is_local else nullcontext():
            return load()
    except Exception as e:  # transformers, the hub and file formats raise dozens of types
        reason = next(
            (line.strip() for line in str(e).splitlines() if line.strip()), type(e).__name__
        )
        action = next((action for part, action in ACTIONS.items() if part in reason), None)
        if files.is_local:
            where = Path(files.name, files.gguf or "")
            raise ModelError(
                f"cannot load the model in {where}: {reason.rstrip('. ')}; "
                f"{action or 'check its files, or download it again'}"
            ) from e
        action = action or "without network, use a local directory or a GGUF file"
        raise ModelError(
            f"cannot get model {files.name!r} from the Hugging Face hub: {reason.rstrip('. ')}. "
            f"{action[0].upper()}{action[1:]}"
        ) from e


def default_device() -> torch.device:
    """Return the current GPU, or the CPU if there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Disable the progress bars of transformers."""
    enabled = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    bar, gguf.tqdm = gguf.tqdm, lambda items, **_: items  # it ignores the setting above
    try:
        yield
    finally:
        gguf.tqdm = bar
        if enabled:
            hf_logging.enable_progress_bar()
