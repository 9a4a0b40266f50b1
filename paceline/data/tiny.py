"""The tiny model: a Qwen2 of 0.6M parameters with one token per byte, made on first use.

It is warmed up by supervised learning with smoothed labels, so that it learns how its task goes but stays unsure of every
character, as a real model is before reinforcement learning: it answers right now and then, however long the warm-up. Same
recipe, same bits (on one machine): one thread, fixed seeds. The result is kept in PACELINE_CACHE or ~/.cache/paceline.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers import modeling_gguf_pytorch_utils as gguf
from transformers.utils import logging as hf_logging

from paceline import __version__
from paceline.data.tasks import Task, get_task

log = logging.getLogger(__name__)

DEFAULT_TASK = "reverse:5"
Progress = Callable[[int, int], None]  # (steps made, steps at most)

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
# Content follows content, so a lone user message is the same tokens with and without the template.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything the finished model depends on; its hash names the folder."""

    task: str
    version: str = __version__
    hidden: int = 192
    ffn: int = 320
    layers: int = 2
    batch: int = 64
    learning_rate: float = 2.5e-3
    target: float = (
        0.25  # how often an answer sampled at temperature 1 is exact when warm-up is over
    )
    max_steps: int = 120
    seed: int = 0

    @property
    def folder(self) -> str:
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return f"tiny-{self.task.replace(':', '-')}-{digest[:12]}"


def tiny_model(spec: str = DEFAULT_TASK, progress: Progress | None = None) -> Path:
    """The folder of the tiny model for a task; made now if it is not there yet."""
    recipe = Recipe(get_task(spec).spec)
    folder = cache_folder() / recipe.folder
    if not folder.exists():
        log.info("making the tiny model for task %s (once; kept in %s)", recipe.task, folder)
        _install(folder, recipe, progress)
    return folder


def cache_folder() -> Path:
    return Path(os.environ.get("PACELINE_CACHE") or "~/.cache/paceline").expanduser()


def _install(folder: Path, recipe: Recipe, progress: Progress | None) -> None:
    """Build beside the final place and rename, so that nobody ever sees half a model."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        tokenizer = make_tokenizer()
        tokenizer.save_pretrained(temporary)
        model = make_model(recipe, tokenizer, progress)
        with no_progress_bars():
            model.save_pretrained(temporary)
        with suppress(OSError):  # another process was faster; its model has the same bits
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing bars for what takes no time."""
    enabled = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    bar, gguf.tqdm = gguf.tqdm, lambda items, **_: items  # it asks nobody
    try:
        yield
    finally:
        gguf.tqdm = bar
        if enabled:
            hf_logging.enable_progress_bar()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so that any text can be written. In the form of Qwen2's own tokenizer (byte-level BPE, here without
    merges), because transformers loads whatever lies beside a Qwen2 model as one."""
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
        tokenizer_object=core, pad_token=PAD, bos_token=BOS, eos_token=EOS
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.padding_side = "left"
    return tokenizer


def make_model(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, progress: Progress | None = None
) -> Qwen2ForCausalLM:
    """Warm up from random weights. One thread and a private random state: the same bits every time, and no trace left."""
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
    exact = 0.0  # running mean of the chance that a sampled answer is exact
    for step in range(recipe.max_steps):
        tokens, is_answer = _examples(task, step, recipe.batch, tokenizer)
        for group in optimizer.param_groups:
            group["lr"] = (
                recipe.learning_rate
                * min(1.0, (step + 1) / 10)
                * (1 - 0.9 * step / recipe.max_steps)
            )
        logits = model(input_ids=tokens[:, :-1]).logits
        loss = cross_entropy(
            logits[is_answer[:, 1:]], tokens[:, 1:][is_answer[:, 1:]], label_smoothing=smoothing
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        logprobs = (
            logits.detach().log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
            * is_answer[:, 1:]
        )
        exact = 0.8 * exact + 0.2 * logprobs.sum(1).exp().mean().item()
        progress(step + 1, recipe.max_steps)
        if step % 20 == 19:
            log.info("warm-up step %d: loss %.3f, exact answers %.2f", step + 1, loss.item(), exact)
        if exact >= 0.9 * recipe.target:
            return


def _smoothing(task: Task, target: float) -> float:
    """The label smoothing with which a model that has learned everything gives an exact answer `target` of the time."""
    rows = [task.row(i, seed=-1) for i in range(256)]
    characters = sum(len(row["answer"]) + 1 for row in rows) / len(rows)  # one more to end it
    return 1 - target ** (1 / characters)


def _examples(
    task: Task, step: int, size: int, tokenizer: PreTrainedTokenizerFast
) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of prompts with their answers [size, longest], and which tokens are answer. Its seed is no run's seed."""
    rows = [task.row(step * size + i, seed=-1) for i in range(size)]
    prompts = tokenizer([row["prompt"] for row in rows])["input_ids"]
    answers = tokenizer([row["answer"] + EOS for row in rows], add_special_tokens=False)[
        "input_ids"
    ]
    longest = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    tokens = torch.full((size, longest), tokenizer.pad_token_id)
    is_answer = torch.zeros(size, longest, dtype=torch.bool)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        tokens[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        is_answer[i, len(prompt) : len(prompt) + len(answer)] = True
    return tokens, is_answer
