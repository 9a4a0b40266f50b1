"""Supervised rows: which tokens they have, which of them are trained, and which rows are bad."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from paceline.data.examples import ExampleSettings, ExampleTokenizer
from paceline.data.prompts import DataSettings, PromptSource
from paceline.data.rows import TokenizedRow
from paceline.data.source import open_source
from paceline.data.tiny import make_tokenizer
from paceline.errors import ConfigError, DataError

TOKENIZER = make_tokenizer()
# A line break follows the end of a turn, as in the template of Qwen.
CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALK = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]


def chat_tokenizer(template: str = CHATML) -> Any:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def example(row: dict[str, Any], tokenizer: Any = TOKENIZER, **settings: Any) -> TokenizedRow:
    source = open_source(ExampleSettings(**settings), tokenizer, 0, [row], ExampleTokenizer)
    return source.row(0)


def texts(row: TokenizedRow, tokenizer: Any = TOKENIZER) -> tuple[str, str]:
    """Return the whole text and the trained text."""
    assert row.mask is not None and len(row.mask) == len(row.tokens)
    return tokenizer.decode(row.tokens), tokenizer.decode(row.tokens[row.mask])


def rejected(tmp_path: Path, *rows: object, tokenizer: Any = TOKENIZER, **settings: Any) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError) as error:
        open_source(
            ExampleSettings(path=str(path), **settings), tokenizer, 0, None, ExampleTokenizer
        )
    return str(error.value)


def test_completion_is_trained_with_end_of_sequence_token() -> None:
    row = example({"prompt": "2+3=", "completion": "5"}, chat=False)
    assert texts(row) == ("<bos>2+3=5<eos>", "5<eos>")


def test_end_of_sequence_token_is_not_repeated() -> None:
    row = example({"prompt": "2+3=", "completion": "5<eos>"}, chat=False)
    assert texts(row) == ("<bos>2+3=5<eos>", "5<eos>")


def test_prompt_does_not_end_with_token_that_the_tokenizer_appends() -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    row = {"prompt": "2+3=", "completion": "5"}
    assert texts(example(row, tokenizer, chat=False)) == ("<bos>2+3=5<eos>", "5<eos>")
    prompt = open_source(DataSettings(chat=False), tokenizer, 0, [row])[0]
    assert tokenizer.decode(prompt.tokens) == "<bos>2+3="


def llama2_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that puts a space in front of a text, as that of Llama 2 does."""
    words = ["<bos>", "<eos>", "▁", "▁h", "s", "a", "y", ":", "h", "i", "\n"]
    core = Tokenizer(BPE({word: n for n, word in enumerate(words)}, merges=[("▁", "h")]))
    core.pre_tokenizer = Metaspace(prepend_scheme="always", split=False)
    core.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>")


def test_completion_gets_no_space_when_its_tokens_would_merge_with_prompt() -> None:
    tokenizer = llama2_tokenizer()
    row = example({"prompt": "say: ", "completion": "hi"}, tokenizer)
    assert texts(row, tokenizer) == ("say: hi<eos>", "hi<eos>")
    assert tokenizer.convert_ids_to_tokens(row.tokens[row.mask].tolist()) == ["h", "i", "<eos>"]


@pytest.mark.parametrize("chat", [True, False])
def test_prompt_has_same_tokens_as_in_reinforcement_learning(chat: bool) -> None:
    row = {"prompt": "sort 21=", "completion": "12"}
    tokens = example(row, chat=chat)
    assert tokens.mask is not None
    before = int(tokens.mask.argmax())
    prompt = open_source(DataSettings(chat=chat), TOKENIZER, 0, [row])[0]
    assert tuple(tokens.tokens[:before].tolist()) == prompt.tokens


def test_chat_prompt_and_completion_are_rendered_without_text_after_end() -> None:
    tokenizer = chat_tokenizer()
    row = example({"prompt": "hi", "completion": "ho"}, tokenizer, system="be brief")
    assert texts(row, tokenizer) == (
        "<system>be brief<eos>\n<user>hi<eos>\n<assistant>ho<eos>",
        "ho<eos>",
    )


def test_completion_may_be_chat_messages() -> None:
    tokenizer = chat_tokenizer()
    row = example({"prompt": TALK[:1], "completion": TALK[1:2]}, tokenizer)
    assert texts(row, tokenizer)[1] == "b<eos>"


def test_every_assistant_message_of_conversation_is_trained() -> None:
    tokenizer = chat_tokenizer()
    row = example({"messages": TALK}, tokenizer)
    assert texts(row, tokenizer) == (
        "<user>a<eos>\n<assistant>b<eos>\n<user>c<eos>\n<assistant>d<eos>",
        "b<eos>d<eos>",
    )


def test_only_last_assistant_message_is_trained_when_asked() -> None:
    tokenizer = chat_tokenizer()
    row = example({"messages": [*TALK, TALK[0]]}, tokenizer, turns="last")
    whole, trained = texts(row, tokenizer)
    assert whole.endswith("<assistant>d<eos>") and trained == "d<eos>"


def test_assistant_messages_of_prompt_are_not_trained() -> None:
    tokenizer = chat_tokenizer()
    row = example({"prompt": TALK[:3], "completion": "d"}, tokenizer)
    assert texts(row, tokenizer)[1] == "d<eos>"


def test_template_that_rewrites_earlier_messages_is_reported(tmp_path: Path) -> None:
    only_last = (
        "{% for m in messages %}{% if m.role == 'user' or loop.last %}<{{ m.role }}>{{ m.content }}"
        "<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer = chat_tokenizer(only_last)
    found = rejected(tmp_path, {"messages": TALK}, tokenizer=tokenizer)
    assert "rows.jsonl:1: the chat template changes the text" in found
    assert "data.turns = 'last'" in found
    row = example({"messages": TALK}, tokenizer, turns="last")
    assert texts(row, tokenizer)[1] == "d<eos>"


def test_null_column_counts_as_absent() -> None:
    row = {"prompt": None, "completion": None, "messages": TALK[:2]}
    assert texts(example(row))[1] == "b<eos>"


def test_task_trains_on_its_answers() -> None:
    settings = ExampleSettings(task="copy:3", limit=2)
    source = open_source(settings, TOKENIZER, 0, None, ExampleTokenizer)
    row = source.row(0)
    assert texts(row)[1] == f"{row.row['answer']}<eos>"


def test_bad_rows_are_reported_with_their_lines(tmp_path: Path) -> None:
    good = {"prompt": "a", "completion": "b"}
    found = rejected(
        tmp_path,
        good,
        {"prompt": "a"},
        {"prompt": "a" * 30, "completion": "b"},
        {"prompt": "a", "completion": ""},
        {"prompt": "a", "completion": 5},
        {"messages": TALK[:1]},
        [1],
        max_length=20,
    )
    assert "6 of 7 rows" in found and "rows.jsonl:1" not in found
    assert "rows.jsonl:2: expected 'prompt' and 'completion', or 'messages'" in found
    assert "rows.jsonl:3: the row has 33 tokens; data.max_length = 20" in found
    assert "rows.jsonl:4: 'completion': the text is empty" in found
    assert "rows.jsonl:5: 'completion' is int" in found
    assert "rows.jsonl:6: no message has the role assistant" in found
    assert "data.on_bad_row = 'skip'" in found


def test_bad_rows_are_left_out_when_asked(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": "a", "completion": "b" * 30}, {"prompt": "a", "completion": "b"}]
    settings = ExampleSettings(max_length=20, on_bad_row="skip")
    source = open_source(settings, TOKENIZER, 0, rows, ExampleTokenizer)
    assert len(source) == 1
    assert "left out 1 of 2 rows" in caplog.text and "row 1: the row has" in caplog.text


def test_missing_columns_are_reported_with_likely_ones(tmp_path: Path) -> None:
    found = rejected(tmp_path, {"question": "a", "response": "b"})
    assert "data.prompt_key=question data.completion_key=response" in found


def test_chat_rows_without_template_are_reported(tmp_path: Path) -> None:
    found = rejected(tmp_path, {"messages": TALK}, chat=False)
    assert "rows.jsonl:1: the row has chat messages, but data.chat is false" in found


def test_tokenizer_without_end_of_sequence_token_is_rejected() -> None:
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        ExampleTokenizer(ExampleSettings(), tokenizer)


def test_held_out_rows_leave_source() -> None:
    rows = [{"prompt": str(n), "completion": "x"} for n in range(10)]
    source = open_source(ExampleSettings(), TOKENIZER, 0, rows, ExampleTokenizer)
    assert isinstance(source, PromptSource)
    held_out = source.hold_out(3)
    assert [row.row["prompt"] for row in held_out] == ["7", "8", "9"]
    assert sorted(source.row(n).row["prompt"] for n in range(7)) == list("0123456")
