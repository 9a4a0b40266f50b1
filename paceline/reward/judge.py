"""Reward of a language model behind an OpenAI-compatible server: it reads a completion and writes a
number.

Waits for: the server, at most `concurrency` requests at a time, each with a deadline. A request
that fails is repeated; after the last time, the group fails. Numbers are kept in a file of the run
directory, so that a resumed run does not ask again.
"""

import asyncio
import hashlib
import json
import logging
import os
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from pydantic import Field, field_validator, model_validator

from paceline.data.chat import conversation
from paceline.errors import CheckpointError, ConfigError, DataError, RewardError, first_error
from paceline.line_file import LineFile, intact_lines
from paceline.settings import Settings
from paceline.types import Prompt, Score, Trajectory

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger(__name__)

CACHE = "judge.jsonl"
MAX_REPLY = 8 << 20  # bytes
RETRIED = frozenset((408, 409, 425, 429))  # and those of 500 and above
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
FIELD = re.compile(r"\{(\w+)\}")
PROMPT = """\
Judge how good the response to the request is: correct, complete and clear.

[Request]
{prompt}

[Response]
{completion}

Explain your judgment in a few sentences. Then write one last line, "Score: N", where N is a number
from 0 (useless) to 10 (perfect)."""


class JudgeSettings(Settings):
    model: str
    """Model of the judge, by the name that its server has for it."""
    base_url: str = "https://api.openai.com/v1"
    """Address of an OpenAI-compatible server, with the version: "http://127.0.0.1:8000/v1"."""
    api_key_env: str | None = None
    """Environment variable with the API key, for example "OPENAI_API_KEY". Default: no key."""
    prompt: str = PROMPT
    """Message to the judge. {completion} is replaced by the completion, {prompt} by the prompt and
    {name} by the column `name` of the dataset row. Default: asks for a score from 0 to 10."""
    pattern: str = r"(?i)score:[\s*]*(-?\d+(?:\.\d+)?)"
    """Regular expression. The first group of its last match in the reply is the number."""
    range: tuple[float, float] = (0.0, 10.0)
    """Lowest and highest number. They become the rewards 0 and 1; others are errors."""
    options: dict[str, Any] = Field({"temperature": 0})
    """Further fields of the request, for example {max_tokens = 500}."""
    concurrency: int = Field(16, ge=1)
    """Maximum number of requests at the same time."""
    timeout_s: float = Field(60.0, gt=0)
    """Maximum seconds per request."""
    retries: int = Field(5, ge=0)
    """How often a request is repeated that fails, times out or has no number in its reply. The
    pauses between them double, up to 60 s."""

    @field_validator("pattern")
    @classmethod
    def _has_group(cls, pattern: str) -> str:
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"reward.judge.pattern = {pattern!r}: {error}") from None
        if groups < 1:
            raise ValueError(
                f"reward.judge.pattern = {pattern!r} has no group; put the number in parentheses"
            )
        return pattern

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if "{completion}" not in self.prompt:
            raise ValueError("reward.judge.prompt does not contain {completion}")
        if not self.range[0] < self.range[1]:
            raise ValueError(f"reward.judge.range = {list(self.range)}: expected low < high")
        if not _is_address(self.base_url):
            raise ValueError(
                f"reward.judge.base_url = {self.base_url!r}: expected http:// or https:// and a "
                'valid host, for example "http://127.0.0.1:8000/v1"'
            )
        if given := {"model", "messages", "stream"} & self.options.keys():
            raise ValueError(f"reward.judge.options: {sorted(given)[0]!r} cannot be set there")
        try:
            json.dumps(self.options)
        except (TypeError, ValueError) as error:  # TOML has dates, for example
            raise ValueError(f"reward.judge.options: expected JSON values ({error})") from None
        return self

    def key(self) -> str | None:
        """Return the API key. Raises ConfigError if its variable is not set."""
        if self.api_key_env is None:
            return None
        if not (key := os.environ.get(self.api_key_env, "").strip()):
            raise ConfigError(
                f"reward.judge.api_key_env = {self.api_key_env!r}: this environment variable is "
                "not set"
            )
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(
                f"reward.judge.api_key_env = {self.api_key_env!r}: the key contains a character "
                "that HTTP headers cannot have; expected printable ASCII"
            )
        return key


class _Failed(Exception):
    """A request without a number. `pause_s`: when the server wants the next one."""

    def __init__(self, what: str, again: bool = True, pause_s: float = 0.0) -> None:
        super().__init__(what)
        self.again, self.pause_s = again, pause_s


class JudgeReward:
    def __init__(self, settings: JudgeSettings, prompt_key: str, run_dir: Path | None) -> None:
        """`run_dir`: where numbers are kept; None: only in memory."""
        self._settings, self._prompt_key = settings, prompt_key
        self._key = settings.key()
        self._url = settings.base_url.rstrip("/") + "/chat/completions"
        self._room = asyncio.Semaphore(settings.concurrency)
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._run_dir = run_dir
        self._known: dict[str, float] | None = None  # read at the first use
        self._length = 0  # bytes of the file up to its last intact line
        self._file: LineFile | None = None
        self._session: aiohttp.ClientSession | None = None

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> Sequence[Score]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._one(prompt, trajectory)) for trajectory in trajectories
                ]
        except BaseExceptionGroup as failed:
            raise first_error(failed) from None
        return [task.result() for task in tasks]

    def check(self, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Raise DataError for a row without a column that the prompt of the judge names."""
        for where, row in rows:
            for name in FIELD.findall(self._settings.prompt):
                if name not in ("prompt", "completion") and name not in row:
                    raise DataError(
                        f"{where} has no column {name!r}, which reward.judge.prompt names; it has "
                        f"{', '.join(map(str, row))}"
                    )

    async def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # of a full disk, which was reported
                self._file.close()
        if self._session is not None:
            await self._session.close()

    async def _one(self, prompt: Prompt, trajectory: Trajectory) -> float:
        text = self._message(prompt.row, trajectory.text)
        body = {
            "model": self._settings.model,
            "messages": [{"role": "user", "content": text}],
            **self._settings.options,
        }
        key = self._cache_key(body)
        known = self._numbers()
        if key not in known:
            await self._ask_once(key, prompt, body)
        low, high = self._settings.range
        return (known[key] - low) / (high - low)

    async def _ask_once(self, key: str, prompt: Prompt, body: dict[str, Any]) -> None:
        """Get the number of a request. Equal requests wait for the one that is in progress."""
        known, lock = self._numbers(), self._asking.setdefault(key, asyncio.Lock())
        async with lock:
            if key not in known:
                async with self._room:
                    known[key] = await self._ask(prompt, body)
                self._keep(key, known[key])

    async def _ask(self, prompt: Prompt, body: dict[str, Any]) -> float:
        for number in range(self._settings.retries + 1):
            try:
                return self._number(await self._reply(body))
            except _Failed as failed:
                problem = failed
            if not problem.again or number == self._settings.retries:
                break
            pause = min(FIRST_PAUSE_S * 2**number, LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)
            await asyncio.sleep(max(pause, min(problem.pause_s, LONGEST_PAUSE_S)))
        raise RewardError(
            f"the judge {self._settings.model!r} at {self._url} gave no score for prompt "
            f"{prompt.uid!r} in {number + 1} request(s): {problem}"
        )

    async def _reply(self, body: dict[str, Any]) -> str:
        """Return the text of the judge. Raises _Failed."""
        import aiohttp  # needs the extra "agents"

        if self._session is None:
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            limit = aiohttp.ClientTimeout(total=self._settings.timeout_s)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._settings.concurrency),
                headers=headers,
                timeout=limit,
                trust_env=True,
            )
        try:
            async with self._session.post(self._url, json=body) as response:
                text = await _text(response)
                if response.status != 200:
                    raise _Failed(
                        f"status {response.status}: {text[:300]}",
                        response.status in RETRIED or response.status >= 500,
                        _seconds(response.headers.get("Retry-After")),
                    )
        except TimeoutError:
            raise _Failed(f"no reply within {self._settings.timeout_s:g} s") from None
        except (aiohttp.ClientError, UnicodeError) as error:  # a redirect to no valid host name
            raise _Failed(f"{type(error).__name__}: {error}") from None
        try:
            content = json.loads(text)["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            raise _Failed(f"the reply is not a chat completion: {text[:300]}") from None
        return content if isinstance(content, str) else ""

    def _number(self, text: str) -> float:
        found = list(re.finditer(self._settings.pattern, text))
        low, high = self._settings.range
        try:
            number = float(found[-1].group(1)) if found else None
        except (TypeError, ValueError):
            number = None
        if number is None:
            raise _Failed(f"no number that reward.judge.pattern finds in {text[-300:]!r}")
        if not low <= number <= high:
            raise _Failed(f"the score {number:g} is outside of {low:g} to {high:g}")
        return number

    def _message(self, row: Mapping[str, Any], completion: str) -> str:
        values = {**row, "prompt": self._prompt_text(row), "completion": completion}
        return FIELD.sub(lambda found: str(values.get(found[1], found[0])), self._settings.prompt)

    def _prompt_text(self, row: Mapping[str, Any]) -> str:
        messages = conversation(row[self._prompt_key])
        if len(messages) == 1:
            return str(messages[0]["content"])
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)

    def _cache_key(self, body: dict[str, Any]) -> str:
        asked = json.dumps(
            [self._url, self._settings.pattern, self._settings.range, body], sort_keys=True
        )
        return hashlib.sha256(asked.encode(errors="surrogatepass")).hexdigest()

    def _numbers(self) -> dict[str, float]:
        """Return the numbers by request, those of an earlier part of the run included."""
        if self._known is None:
            self._known = {}
            low, high = self._settings.range
            for line in intact_lines(self._run_dir / CACHE) if self._run_dir else ():
                self._length = line.end
                row = line.row or {}
                number = row.get("number")
                if isinstance(number, float | int) and low <= number <= high:
                    self._known[str(row.get("request"))] = float(number)
        return self._known

    def _keep(self, key: str, number: float) -> None:
        if self._run_dir is None or not self._run_dir.is_dir():
            return
        try:
            if self._file is None:
                self._file = LineFile(self._run_dir / CACHE, self._length)
            self._file.write({"request": key, "number": number})
            self._file.flush()
        except (OSError, CheckpointError) as error:
            log.warning("a score of the judge is not kept: %s", error)


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")  # as for a request; "a..b" raises
        return parts.scheme in ("http", "https") and bool(host) and parts.port != 0
    except ValueError:
        return False


async def _text(response: "aiohttp.ClientResponse") -> str:
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > MAX_REPLY:
            raise _Failed(f"the reply has more than {MAX_REPLY} bytes")
    return body.decode(errors="replace")


def _seconds(header: str | None) -> float:
    try:
        return float(header or 0)
    except ValueError:
        return 0.0  # a date
