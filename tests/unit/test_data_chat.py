"""Chat templates and stop tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from paceline.data.chat import stop_token_ids, text_decoder
from paceline.data.prompts import DataSettings, PromptSource
from paceline.data.tiny import make_tokenizer
from paceline.errors import ConfigError, DataError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_tokenizer(template: str | None = CHATML) -> Any:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def text_of(path: str, tokenizer: Any, **settings: Any) -> str:
    prompt = PromptSource(DataSettings(path=path, **settings), tokenizer, 0)[0]
    assert tokenizer.decode(prompt.tokens).removeprefix("<bos>") == prompt.text
    return prompt.text


def write(file: Path, row: dict[str, Any]) -> str:
    file.write_text(json.dumps(row))
    return str(file)


def test_text_becomes_user_message_with_chat_template(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "hi"})
    assert (
        text_of(path, chat_tokenizer()) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text_of(path, chat_tokenizer(), chat=False) == "hi"
    assert text_of(path, chat_tokenizer(None)) == "hi"


def test_system_message_goes_first_unless_row_has_one(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
    path = write(tmp_path / "a.jsonl", {"prompt": "hi"})
    assert text_of(path, chat_tokenizer(), system="be brief").startswith(
        "<|im_start|>system\nbe brief<|im_end|>"
    )
    path = write(tmp_path / "b.jsonl", {"prompt": own})
    assert text_of(path, chat_tokenizer(), system="be brief").count("system") == 1


def test_messages_are_rejected_without_chat_template(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": [{"role": "user", "content": "hi"}]})
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        text_of(path, chat_tokenizer(None))
    with pytest.raises(ConfigError, match=r"data\.chat = true"):
        text_of(path, chat_tokenizer(None), chat=True)
    with pytest.raises(ConfigError, match=r"data\.system is set"):
        text_of(path, chat_tokenizer(None), system="x")


def test_text_parts_are_joined_and_null_fields_removed(tmp_path: Path) -> None:
    template = CHATML.replace(
        "<|im_end|>",
        "{% if m.tool_calls is defined %}calls {{ m.tool_calls[0].name }}{% endif %}<|im_end|>",
    )
    messages: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "what "}, {"type": "text", "text": "is it?"}],
            "tool_calls": None,
        },
        {"role": "assistant", "content": None, "tool_calls": [{"name": "look"}]},
        {"role": "tool", "content": "rain", "tool_calls": None},
    ]
    text = text_of(write(tmp_path / "a.jsonl", {"prompt": messages}), chat_tokenizer(template))
    turns = ["user\nwhat is it?", "assistant\ncalls look", "tool\nrain"]
    rendered = "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns)
    assert text == rendered + "<|im_start|>assistant\n"
    messages[0]["content"].append({"type": "image", "image": "a.png"})
    with pytest.raises(DataError, match="message 1 has a part of type 'image'; only text"):
        text_of(write(tmp_path / "a.jsonl", {"prompt": messages}), chat_tokenizer(template))


def test_arguments_of_tool_calls_become_objects_when_they_are_json_text(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }};"
        "{% endfor %}{% endfor %}"
    )
    calls = [
        {"type": "function", "function": {"name": "look", "arguments": arguments}}
        for arguments in ('{"at": "sky"}', {"at": "sea"}, "not JSON")
    ]
    messages = [
        {"role": "user", "content": "what is it?", "tool_calls": []},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "rain", "tool_calls": []},
    ]
    text = text_of(write(tmp_path / "a.jsonl", {"prompt": messages}), chat_tokenizer(template))
    assert text == '{"at": "sky"};{"at": "sea"};"not JSON";'


def test_row_is_bad_when_chat_template_rejects_it(tmp_path: Path) -> None:
    strict = chat_tokenizer("{{ raise_exception('no user role') }}")
    with pytest.raises(DataError, match=r"a\.jsonl:1: the chat template failed: no user role"):
        text_of(write(tmp_path / "a.jsonl", {"prompt": "hi"}), strict)
    with pytest.raises(DataError, match=r"a\.jsonl:1: the chat template failed: TypeError"):
        text_of(
            write(tmp_path / "a.jsonl", {"prompt": "hi"}), chat_tokenizer("{{ messages + 'x' }}")
        )


def test_stop_tokens_combine_eos_end_of_turn_and_generation_config() -> None:
    tokenizer = chat_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert stop_token_ids(make_tokenizer()) == (2,)
    assert stop_token_ids(tokenizer) == (2, end)
    assert stop_token_ids(tokenizer, GenerationConfig(eos_token_id=[7, 2])) == (2, 7, end)


@pytest.mark.parametrize("cleans", [False, True])
def test_text_decoder_equals_decode_without_special_tokens(cleans: bool) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.clean_up_tokenization_spaces = cleans
    tokens = tokenizer.encode("<bos><|im_start|>a , b<|im_end|>")
    expected = tokenizer.decode(tokens, skip_special_tokens=True)
    assert text_decoder(tokenizer)(tokens) == expected
    assert "im_start" not in expected


def test_row_is_bad_when_chat_template_leaves_out_its_text(tmp_path: Path) -> None:
    silent = chat_tokenizer("{% if false %}{% endif %}")
    with pytest.raises(DataError, match="no tokens; the chat template left out its text"):
        text_of(write(tmp_path / "a.jsonl", {"prompt": "hi"}), silent)


def test_row_names_chat_template_when_it_is_not_valid(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the chat template failed: Expected an expression"):
        text_of(write(tmp_path / "a.jsonl", {"prompt": "hi"}), chat_tokenizer("{% for %}"))
