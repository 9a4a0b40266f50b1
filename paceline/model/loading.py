"""Loading models and tokenizers: a local folder, a hub id, a folder with one GGUF file, or the built-in tiny model.

Whatever goes wrong is one ModelError that says what was looked for and where.
"""

import hashlib
from collections.abc import Callable
from contextlib import nullcontext
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

from paceline.data.tiny import DEFAULT_TASK, Progress, no_progress_bars, tiny_model
from paceline.errors import ModelError

WEIGHTS = ("*.safetensors", "*.gguf", "pytorch_model*.bin")
TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "spiece*")
EXACT, ROUNDED = (
    1e-4,
    0.05,
)  # how far log-probs may be from a plain forward pass, relative and on average: in float32, in bfloat16
SAMPLED = 1 << 20  # bytes read at the start, middle and end of a weight file for its fingerprint


def resolve_model(name: str, task: str | None = None, progress: Progress | None = None) -> str:
    """What `name` means: a folder or a hub id. "tiny" is the built-in model for `task`, "tiny:<task>" for the task it names;
    it is made now if need be, which takes some seconds."""
    if name == "tiny" or name.startswith("tiny:"):
        return str(
            tiny_model(
                name.removeprefix("tiny").removeprefix(":") or task or DEFAULT_TASK, progress
            )
        )
    path = Path(name).expanduser()
    if path.exists():
        return str(_checked(path))
    if name.startswith(("/", ".", "~")) or name.count("/") != 1 or name.endswith("/"):
        raise ModelError(
            f"no model at {name!r} (looked from {Path.cwd()}); give a folder, a hub id such as 'Qwen/Qwen2.5-0.5B', or 'tiny'"
        )
    return name


def load_model(
    name: str, dtype: str = "float32", kind: Any = AutoModelForCausalLM
) -> PreTrainedModel:
    """The model with its weights, in evaluation mode, every dropout off. `kind`: which of transformers' auto classes."""
    source = resolve_model(name)
    config = load_config(source)
    number = getattr(torch, dtype, None)
    if not isinstance(number, torch.dtype) or not number.is_floating_point:
        raise ModelError(
            f"model dtype {dtype!r} is not a floating point type of torch; use 'float32' or 'bfloat16'"
        )
    options = {"config": config, "dtype": number, "output_loading_info": True, **_gguf(source)}
    if "gguf_file" in options and hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model, info = _load(source, lambda: kind.from_pretrained(source, **options))
    if "gguf_file" in options:
        _forget_quantization(model)
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ModelError(
            f"{source}: {len(missing)} weights are missing, for example {missing[0]!r}; the download may be incomplete"
        )
    model.eval()
    return model


def load_config(name: str) -> PretrainedConfig:
    source = resolve_model(name)
    gguf = _gguf(source).get("gguf_file")
    config = (
        deepcopy(_gguf_config(source, gguf, (Path(source) / gguf).stat().st_mtime_ns))
        if gguf
        else _read_config(source)
    )
    for key, value in config.to_dict().items():
        # The trainer's log-probs must match the engine's, so nothing random may happen inside the model.
        if isinstance(value, float) and ("dropout" in key or key.endswith(("_pdrop", "_drop"))):
            setattr(config, key, 0.0)
    return config


def model_body(model: PreTrainedModel) -> Any:
    """What makes the hidden states, without the output layer; a model that has none is its own body."""
    if model.base_model is not model or model.get_output_embeddings() is None:
        return model.base_model
    return next(
        part for part in model.children() if isinstance(part, PreTrainedModel)
    )  # under a name other than it says


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    source = resolve_model(name)
    missing = ModelError(
        f"{source} has no tokenizer; save the model's own beside it (tokenizer.json, tokenizer_config.json)"
    )
    if (
        Path(source).is_dir()
        and not _gguf(source)
        and not any(any(Path(source).glob(name)) for name in TOKENIZERS)
    ):
        raise missing
    tokenizer: PreTrainedTokenizerBase = _load(
        source, lambda: AutoTokenizer.from_pretrained(source, **_gguf(source))
    )
    if tokenizer.get_vocab().keys() <= set(
        tokenizer.all_special_tokens
    ):  # what transformers makes up when the files are not there
        raise missing
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_generation_config(name: str) -> GenerationConfig:
    """How the model wants to be sampled: its own file, or else what its config says. Its list of end tokens matters to us."""
    source = resolve_model(name)
    try:
        return GenerationConfig.from_pretrained(source)
    except (OSError, ValueError):
        return GenerationConfig.from_model_config(load_config(source))


def model_fingerprint(name: str) -> str:
    """Changes when the model does: config, and the size and sampled bytes of every weight file (all bytes of small ones)."""
    source = resolve_model(name)
    digest = hashlib.sha256(load_config(source).to_json_string().encode())
    folder = Path(source)
    if not folder.is_dir():
        digest.update(str(getattr(load_config(source), "_commit_hash", "")).encode())
    for file in sorted(f for pattern in WEIGHTS for f in folder.glob(pattern)):
        size = file.stat().st_size
        digest.update(f"{file.name}/{size}".encode())
        with file.open("rb") as data:
            for start in (0, max(0, size // 2), max(0, size - SAMPLED)):
                data.seek(start)
                digest.update(data.read(SAMPLED))
    return digest.hexdigest()


def _checked(folder: Path) -> Path:
    if not folder.is_dir():
        raise ModelError(f"model {str(folder)!r} is a file; give the folder it is in")
    weights = [f for pattern in WEIGHTS for f in folder.glob(pattern)]
    if not weights:
        raise ModelError(
            f"model folder {folder} holds no weights (looked for {', '.join(WEIGHTS)})"
        )
    gguf = [f.name for f in weights if f.suffix == ".gguf"]
    if (folder / "config.json").exists():
        return folder
    if len(gguf) != 1:
        raise ModelError(
            f"model folder {folder} has no config.json"
            + (f" and {len(gguf)} GGUF files; keep one" if gguf else "")
        )
    return folder


def _gguf(source: str) -> dict[str, str]:
    """The extra argument transformers needs when a folder holds a GGUF file instead of a config."""
    folder = Path(source)
    if not folder.is_dir() or (folder / "config.json").exists():
        return {}
    return {"gguf_file": next(folder.glob("*.gguf")).name}


def _read_config(source: str) -> PretrainedConfig:
    config: PretrainedConfig = _load(
        source, lambda: AutoConfig.from_pretrained(source, **_gguf(source))
    )
    return config


@lru_cache(maxsize=4)
def _gguf_config(source: str, name: str, changed_ns: int) -> PretrainedConfig:
    """Kept, since transformers goes through the whole vocabulary for it, which takes seconds."""
    return _read_config(source)


def _forget_quantization(model: PreTrainedModel) -> None:
    """Its weights are plain numbers by now; transformers would refuse to cast it, or take it for quantized when it is loaded again."""
    model.is_quantized = False
    for owner, name in (
        (model, "hf_quantizer"),
        (model, "quantization_method"),
        (model.config, "quantization_config"),
    ):
        if hasattr(owner, name):
            delattr(owner, name)


def _load(source: str, load: Callable[[], Any]) -> Any:
    try:
        with no_progress_bars() if Path(source).is_dir() else nullcontext():
            return load()
    except (
        Exception
    ) as e:  # transformers, hub and file formats raise dozens of types; a user needs one sentence
        reason = next(
            (line.strip() for line in str(e).splitlines() if line.strip()), type(e).__name__
        )
        if Path(source).is_dir():
            raise ModelError(f"cannot load the model in {source}: {reason}") from e
        raise ModelError(
            f"cannot get model {source!r} from the hub: {reason} Without network, give a local folder."
        ) from e
