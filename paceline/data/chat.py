"""Chat templates: messages to text, checks of messages, and the tokens that end a completion."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

Message = Mapping[str, Any]

# Tokens that end a turn in common chat formats; models often list only one of them as EOS.
END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|end_of_turn|>",
    "<turn|>",
    "<|return|>",
)


def has_template(tokenizer: "PreTrainedTokenizerBase") -> bool:
    return bool(tokenizer.chat_template)


def render(
    tokenizer: "PreTrainedTokenizerBase", prompt: str | Sequence[Message], system: str | None = None
) -> str:
    """Render the prompt with the chat template, up to where the completion begins.

    `system` is put first unless the prompt has a system message.
    """
    text = tokenizer.apply_chat_template(
        conversation(prompt, system), tokenize=False, add_generation_prompt=True
    )
    assert isinstance(text, str)
    return text


def conversation(
    prompt: str | Sequence[Message], system: str | None = None
) -> list[dict[str, Any]]:
    """Return the prompt of a row as plain chat messages.

    Text becomes a user message and text parts are joined. Null fields are left out: tabular files
    have every field in every message, and templates check whether a field is defined. Arguments of
    tool calls that are JSON text, as in OpenAI's format, become objects, which templates expect.
    """
    messages: Sequence[Message] = (
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    )
    turns = [
        {name: value for name, value in m.items() if value is not None}
        | {"content": _joined_text(m.get("content"))}
        for m in messages
    ]
    for turn in turns:
        if isinstance(turn.get("tool_calls"), list):
            turn["tool_calls"] = [_readable_call(call) for call in turn["tool_calls"]]
    if system is not None and turns[0]["role"] != "system":
        turns.insert(0, {"role": "system", "content": system})
    return turns


def _readable_call(call: Any) -> Any:
    """Return a tool call with its arguments as an object, if they can be read."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _joined_text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content or ())


def stop_token_ids(
    tokenizer: "PreTrainedTokenizerBase", generation: "GenerationConfig | None" = None
) -> tuple[int, ...]:
    """Return the tokens that end a completion.

    These are the tokenizer's EOS, the end-of-turn tokens of its vocabulary, and the EOS tokens of
    the model's generation config.
    """
    ids = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    vocabulary = tokenizer.get_vocab()
    ids |= {vocabulary[token] for token in END_OF_TURN if token in vocabulary}
    eos = generation.eos_token_id if generation is not None else None
    if eos is not None:
        ids |= {eos} if isinstance(eos, int) else set(eos)
    return tuple(sorted(ids))


def text_decoder(
    tokenizer: "PreTrainedTokenizerBase", keep_special: bool = False
) -> Callable[[list[int]], str]:
    """Return a function that turns tokens into text, by default without special tokens.

    The tokenizer's own `decode` inspects every token in Python, so the library below it is called
    directly where the result is the same. Spaces of BPE tokenizers are never cleaned up, because
    that would change the text.
    """
    from transformers import PreTrainedTokenizerFast

    if getattr(type(tokenizer), "_decode", None) is PreTrainedTokenizerFast._decode:
        below = tokenizer.backend_tokenizer
        if not tokenizer.clean_up_tokenization_spaces or type(below.model).__name__ == "BPE":
            return partial(below.decode, skip_special_tokens=not keep_special)
    return partial(tokenizer.decode, skip_special_tokens=not keep_special)


def message_problem(prompt: Any, complete: bool = False) -> str | None:
    """Return what is wrong with a prompt given as chat messages, or None.

    `complete`: the messages include the completion, so an assistant's may be the last.
    """
    if not prompt:
        return "the list of messages is empty"
    for number, message in enumerate(prompt, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return f'message {number} is not {{"role": text, "content": text}}'
        content = message.get("content")
        if content is None and message.get("tool_calls"):
            continue
        if isinstance(content, list) and (
            kinds := [_kind(part) for part in content if _kind(part) != "text"]
        ):
            return f"message {number} has a part of type {kinds[0]!r}; only text can be trained on"
        if not isinstance(content, str | list):
            return f'message {number} is not {{"role": text, "content": text}}'
    text = "".join(_joined_text(m.get("content")) for m in prompt)
    if not text.strip():
        return "the text is empty"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "the text contains a lone surrogate, which is not a valid character"
    if prompt[-1]["role"] == "assistant" and not complete:
        return "the last message has the role assistant; expected a message to respond to"
    return None


def _kind(part: Any) -> str:
    if not isinstance(part, Mapping):
        return type(part).__name__
    return "text" if isinstance(part.get("text"), str) else str(part.get("type"))
