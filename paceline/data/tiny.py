"""Tiny model: a Qwen2 with 0.6M parameters and one token per byte, created on first use.

Supervised warm-up with label smoothing teaches it the task but keeps it unsure of every character,
like a real model before RL: only some sampled completions are exact, however long the warm-up. The
teacher for distillation has one more layer and learns the task almost completely. On one machine,
the same recipe gives the same bits, because warm-up uses one thread and fixed seeds. The models are
kept in the cache (model/cache.py).
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from paceline import __version__
from paceline.data.tasks import BUILT_IN_MODELS, Task, get_task
from paceline.errors import ModelError
from paceline.model.cache import install, readable_caches, writable_cache
from paceline.model.gguf_cache import converted_model
from paceline.model.loading import no_progress_bars, save_tokenizer
from paceline.model.source import model_source

log = logging.getLogger(__name__)

DEFAULT_TASK = "reverse:5"
Progress = Callable[[int, int], None]  # (steps done, maximum number of steps)

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
# It only concatenates contents, so a single user message has the same tokens without the template.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything the model depends on. Its hash is part of the directory name."""

    task: str
    version: str = __version__
    hidden: int = 192
    ffn: int = 320
    layers: int = 2
    batch: int = 64
    learning_rate: float = 2.5e-3
    # Fraction of completions sampled at temperature 1 that are exact after warm-up.
    target: float = 0.25
    max_steps: int = 120
    seed: int = 0

    @property
    def folder(self) -> str:
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return f"tiny-{self.task.replace(':', '-')}-{digest[:12]}"


def recipe_of(name: str, task: str) -> Recipe:
    """Return how the built-in model of a name is made."""
    if name == "tiny-teacher":
        return Recipe(task, layers=3, target=0.95, max_steps=300)
    return Recipe(task)


def resolve_model(name: str, task: str | None = None, progress: Progress | None = None) -> str:
    """Return the Hugging Face directory or model ID that `name` means.

    "tiny" is the built-in model for `task`, "tiny:<task>" for that task; "tiny-teacher" is the
    same. A built-in model is created on first use, which takes some seconds, and a GGUF file is
    converted. `progress` is called with the steps or bytes that are done and their total.
    """
    kind, _, spec = name.partition(":")
    if kind in BUILT_IN_MODELS:
        return str(tiny_model(spec or task or DEFAULT_TASK, progress, kind))
    return converted_model(model_source(name), progress)


def tiny_model(
    spec: str = DEFAULT_TASK, progress: Progress | None = None, name: str = "tiny"
) -> Path:
    """Return the directory of the tiny model for a task; create the model if necessary."""
    recipe = recipe_of(name, get_task(spec).spec)

    def build(folder: Path) -> None:
        tokenizer = make_tokenizer()
        save_tokenizer(tokenizer, folder)
        make_model(recipe, tokenizer, progress).save_pretrained(folder)

    return cached_model(recipe.folder, build)


def cached_model(name: str, build: Callable[[Path], None]) -> Path:
    """Return the directory of a built-in model; create it with `build` if necessary."""
    for cache in readable_caches():
        if os.path.exists(cache / name):  # False if the directory cannot be read
            return cache / name
    folder = writable_cache() / name
    log.info("creating the built-in model %s", folder)
    try:
        with no_progress_bars():
            install(folder, build)
    except OSError as error:
        raise ModelError(
            f"the tiny model cannot be written to {folder}: {error.strerror or error}; "
            "set PACELINE_CACHE to a directory with a few MB of free space"
        ) from error
    return folder


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, which can represent any text.

    It is a byte-level BPE without merges, because transformers loads the tokenizer of a Qwen2 model
    as a byte-level BPE.
    """
    vocabulary = {
        token: i for i, token in enumerate([PAD, BOS, EOS, *sorted(ByteLevel.alphabet())])
    }
    core = Tokenizer(BPE(vocabulary, merges=[]))
    core.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    core.post_processor = TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
    )
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=PAD,  # never used; else transformers adds <|endoftext|> to that of a Qwen2 model
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.padding_side = "left"
    return tokenizer


def make_model(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, progress: Progress | None = None
) -> Qwen2ForCausalLM:
    """Create the model from random weights and warm it up.

    One thread and a private random state make it reproducible and leave the caller's state alone.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            model = Qwen2ForCausalLM(_config(recipe, tokenizer))
            _warm_up(model, recipe, tokenizer, progress or (lambda step, total: None))
    finally:
        torch.set_num_threads(threads)
    return model.eval()


def _config(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.ffn,
        num_hidden_layers=recipe.layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _warm_up(
    model: Qwen2ForCausalLM, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, progress: Progress
) -> None:
    task = get_task(recipe.task)
    smoothing = _smoothing(task, recipe.target)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    exact = 0.0  # running mean of the probability that a sampled completion is exact
    for step in range(recipe.max_steps):
        tokens, is_answer = _examples(task, step, recipe.batch, tokenizer)
        schedule = min(1.0, (step + 1) / 10) * (1 - 0.9 * step / recipe.max_steps)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * schedule
        logits = model(input_ids=tokens[:, :-1]).logits
        loss = cross_entropy(
            logits[is_answer[:, 1:]], tokens[:, 1:][is_answer[:, 1:]], label_smoothing=smoothing
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        logprobs = logits.detach().log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        exact = 0.8 * exact + 0.2 * (logprobs * is_answer[:, 1:]).sum(1).exp().mean().item()
        progress(step + 1, recipe.max_steps)
        if step % 20 == 19:
            log.info(
                "warm-up step %d: loss %.3f, exact completions %.2f", step + 1, loss.item(), exact
            )
        if exact >= 0.9 * recipe.target:
            return


def _smoothing(task: Task, target: float) -> float:
    """Return the label smoothing at which a perfect learner is exact with probability `target`."""
    rows = [task.row(i, seed=-1) for i in range(256)]
    characters = sum(len(row["answer"]) + 1 for row in rows) / len(rows)  # 1 is the EOS token
    return 1 - target ** (1 / characters)


def _examples(
    task: Task, step: int, size: int, tokenizer: PreTrainedTokenizerFast
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prompts with reference answers [size, longest], and the mask of the answer tokens.

    The seed of the rows is -1, which no run uses.
    """
    rows = [task.row(step * size + i, seed=-1) for i in range(size)]
    prompts = tokenizer([row["prompt"] for row in rows])["input_ids"]
    texts = [row["answer"] + EOS for row in rows]
    answers = tokenizer(texts, add_special_tokens=False)["input_ids"]
    longest = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    tokens = torch.full((size, longest), tokenizer.pad_token_id)
    is_answer = torch.zeros(size, longest, dtype=torch.bool)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        tokens[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        is_answer[i, len(prompt) : len(prompt) + len(answer)] = True
    return tokens, is_answer
