"""Text of models, data and user code as it may be shown: without control characters and secrets.

Raw, control characters could move the cursor, change the title of a terminal, hide a line or
reverse its direction. All consoles, log files and error messages use this module.
"""

import logging
import os
import re
import sys
from io import TextIOWrapper

from paceline.secret_variables import is_secret

LOG_FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"
MAX_ERROR = 2000  # characters of the text of an exception
MIN_SECRET_LENGTH = 8  # characters; a shorter value occurs in other text by chance

# C0 without tab and newline, DEL, C1, marks of writing direction, separators of lines, and
# surrogates, which cannot be encoded.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Return the text with an escape such as \\u001b, which is valid in JSON, for each control."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def describe_error(error: BaseException, limit: int = MAX_ERROR) -> str:
    """Return type and text of an exception of user code, whose `__str__` may fail.

    Of a group of exceptions, these are those of the first: a group only says how many it has.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    try:
        text = str(error)
    except Exception as failed:
        text = f"(its text cannot be shown: {type(failed).__name__})"
    if len(text) > limit:
        text = f"{text[:limit]}… ({len(text)} characters)"
    return f"{type(error).__name__}: {text}"


def redacted(text: str) -> str:
    """Replace the values of environment variables that look like secrets, such as OPENAI_API_KEY
    or HF_TOKEN: errors of libraries and user code may quote them."""
    found = {
        value: name
        for name, value in os.environ.items()
        if len(value) >= MIN_SECRET_LENGTH and value in text and is_secret(name, value)
    }
    for value in sorted(found, key=len, reverse=True):  # one may be a part of another
        text = text.replace(value, f"<{found[value]}>")
    return text


class LogFormatter(logging.Formatter):
    """Formatter of every log file."""

    def __init__(self) -> None:
        super().__init__(LOG_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        return printable(redacted(super().format(record)))


def log_to_stderr() -> None:
    """Log a worker process to its stderr, which is its log file."""
    unicode_output()
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def unicode_output() -> None:
    """Let a worker print any text into its log, also where the locale has no Unicode."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
