"""Chat messages to text and tokens, and which tokens end an answer."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

Message = Mapping[str, Any]

# Tokens that end a turn in the chat formats in use; models often name only one of them as their eos.
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|end_of_turn|>", "<turn|>", "<|return|>")


def has_template(tokenizer: "PreTrainedTokenizerBase") -> bool:
    return bool(tokenizer.chat_template)


def render(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], system: str | None = None) -> str:
    """The messages as the model wants to see them, up to where its answer begins. `system` goes first unless they bring their own."""
    turns = [dict(m) for m in messages]
    if system is not None and turns[0]["role"] != "system":
        turns.insert(0, {"role": "system", "content": system})
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    return text


def stop_token_ids(tokenizer: "PreTrainedTokenizerBase", generation: "GenerationConfig | None" = None) -> tuple[int, ...]:
    """Every token after which an answer is over: the tokenizer's eos, end-of-turn tokens of its vocabulary, and the model's eos list."""
    ids = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    vocabulary = tokenizer.get_vocab()
    ids |= {vocabulary[token] for token in END_OF_TURN if token in vocabulary}
    eos = generation.eos_token_id if generation is not None else None
    if eos is not None:
        ids |= {eos} if isinstance(eos, int) else set(eos)
    return tuple(sorted(ids))


def message_problem(prompt: Any) -> str | None:
    """What is wrong with a prompt given as chat messages; None when nothing is."""
    for number, message in enumerate(prompt, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            return f'message {number} is not {{"role": text, "content": text}}'
    if not prompt:
        return "the list of messages is empty"
    text = "".join(m["content"] for m in prompt)
    if not text.strip():
        return "the prompt is empty"
    if any("\ud800" <= c <= "\udfff" for c in text):
        return "the text holds half a character (a lone surrogate)"
    if prompt[-1]["role"] == "assistant":
        return "the last message is the assistant's, so there is nothing left to answer"
    return None
