"""Text of models and data reaches terminals, logs and messages without control characters."""

import ast
import io
import json
import logging
import re
from pathlib import Path

import pytest
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from paceline.errors import PacelineError
from paceline.observe.console import RunConsole
from paceline.observe.samples import samples_panel
from paceline.printable import LogFormatter, describe_error, printable, redacted
from paceline.run_dir import log_file
from tests.exceptions import Speechless

PACKAGE = Path(__file__).parents[2] / "paceline"
# Set the title, clear the screen, C1's escape, reverse the direction, a new line for some readers.
HOSTILE = "[/x] \x1b]0;owned\x07 \x1b[2J \x9b31m \u202eback \u2028 \r\x00 \ud800 [bold]"
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\ud800-\udfff]")


def shown(*things: object, encoding: str = "utf-8") -> str:
    written = io.BytesIO()
    file = io.TextIOWrapper(written, encoding=encoding)
    RunConsole(file=file, width=200).print(*things)
    file.flush()
    return written.getvalue().decode(encoding)


def test_printable_escapes_controls_and_keeps_other_text() -> None:
    assert not CONTROLS.search(printable(HOSTILE)) and "\\u001b]0;owned" in printable(HOSTILE)
    assert printable("Zürich\t日本 👩‍🚀\n") == "Zürich\t日本 👩‍🚀\n"
    assert json.loads('"' + printable("\x9b") + '"') == "\x9b"


def test_console_shows_hostile_text_as_text() -> None:
    table = Table("name", title=HOSTILE)
    table.add_row(HOSTILE)
    things = [HOSTILE, table, Panel(Text(HOSTILE), title=Text(printable(HOSTILE)))]
    for text in map(shown, things):
        assert not CONTROLS.search(text)
        assert "[/x]" in text and "[bold]" in text


def test_console_keeps_numbers_of_lines_that_are_codes_of_emoji() -> None:
    assert "rows.jsonl:100: is empty" in shown("rows.jsonl:100: is empty")


def test_error_of_user_code_is_described_whatever_its_text_is() -> None:
    assert describe_error(ValueError("wrong")) == "ValueError: wrong"
    assert describe_error(Speechless()) == "Speechless: (its text cannot be shown: RuntimeError)"
    groups = ExceptionGroup("tasks", [ExceptionGroup("tasks", [ValueError("wrong")]), KeyError()])
    assert describe_error(groups) == "ValueError: wrong"
    described = describe_error(ValueError("x" * 10_000_000))
    assert described.startswith("ValueError: xxx") and described.endswith("(10000000 characters)")
    assert len(described) < 3000


def test_samples_panel_shows_hostile_ids_and_names_of_rewards() -> None:
    completion = {"reward": 1.0, "details": {HOSTILE: 1.0}, "tokens": 1, "finish": "stop"}
    turn = {"prompt": HOSTILE, "text": HOSTILE, "reward": 0.0}
    completion |= {"text": HOSTILE, "turns": [turn]}
    row = {"step": 1, "uid": HOSTILE, "staleness": 0, "prompt": HOSTILE}
    text = shown(samples_panel(row | {"completions": [completion]}))
    assert not CONTROLS.search(text) and text.count("[/x]") == 5


def test_error_messages_have_no_control_characters() -> None:
    assert not CONTROLS.search(str(PacelineError(f"the reward function raised {HOSTILE}")))


def test_messages_name_secrets_instead_of_quoting_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        *("OPENAI_API_KEY", "HF_TOKEN", "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD2"),
        *("SSH_PASSPHRASE", "GH_PAT", "SENTRY_DSN", "NPM_AUTH", "PROXYKEY"),
    ):
        monkeypatch.setenv(name, f"value of {name}")
        assert str(PacelineError(f"401 for 'value of {name}'")) == f"401 for '<{name}>'"
    monkeypatch.setenv("DATABASE", "postgres://me:pw@db/x")
    assert redacted("cannot open postgres://me:pw@db/x") == "cannot open <DATABASE>"
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "ordinary value")
    monkeypatch.setenv("SHORT_TOKEN", "on")
    assert redacted("an ordinary value is on") == "an ordinary value is on"


def test_main_log_has_no_control_characters(tmp_path: Path) -> None:
    logging.getLogger("paceline").propagate, before = False, logging.getLogger("paceline").propagate
    try:
        with log_file(tmp_path):
            log = logging.getLogger("paceline.test")
            log.warning("row %s", HOSTILE)
            try:
                raise ValueError(HOSTILE)
            except ValueError:
                log.exception("failed")
    finally:
        logging.getLogger("paceline").propagate = before
    text = (tmp_path / "main.log").read_text(encoding="utf-8")
    assert text.count("[/x]") >= 2 and not CONTROLS.search(text)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_console_prints_any_text_when_output_has_no_unicode(encoding: str) -> None:
    table = Table("reward, first → last", title="Überschrift …")
    table.add_row("≤ 3 ▁▂▃▄▅▆▇█ 日本")
    text = shown(table, encoding=encoding)
    assert "first > last" in text and "\\u65e5" in text


def test_package_prints_with_its_console_and_logs_with_its_formatter() -> None:
    names, found = ("Console", "logging.Formatter", "logging.basicConfig", "print"), []
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if not any(f"{name}(" in text for name in names):
            continue  # to parse every file takes seconds
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in names:
                found.append((path.relative_to(PACKAGE).as_posix(), name))
    assert sorted(found) == [("printable.py", "logging.basicConfig"), ("trl/trainer.py", "print")]
    line = LogFormatter().format(logging.LogRecord("x", 20, "", 0, "\x1b", (), None))
    assert line.endswith("\\u001b")
