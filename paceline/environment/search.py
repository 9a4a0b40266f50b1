"""Tool `search`: retrieval over the text files of a directory, ranked by BM25. Needs no service."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.errors import ConfigError

MAX_BYTES = 64 << 20  # of all text files: the index is in memory
HEAD = 4096  # bytes of a file that show whether it is text
PASSAGE_LENGTH = 800  # characters; a longer line is a separate passage
SHOWN_LENGTH = 1000  # characters of a passage that the model gets
MAX_RESULTS = 5
K1, B = 1.5, 0.75  # the usual constants of BM25
_WORD = re.compile(r"\w+")


class Index:
    """Passages of text files, by the words in them."""

    def __init__(self, folder: Path) -> None:
        self._passages: list[tuple[str, str]] = []  # (where, text)
        self._lengths: list[int] = []  # in words
        self._found: dict[str, list[tuple[int, int]]] = defaultdict(list)  # word: (passage, count)
        for where, text in _passages(folder):
            words = Counter(_words(text))
            for word, count in words.items():
                self._found[word].append((len(self._passages), count))
            self._passages.append((where, text))
            self._lengths.append(words.total())
        self._mean = sum(self._lengths) / max(1, len(self._lengths))

    def __len__(self) -> int:
        return len(self._passages)

    def search(self, query: str, limit: int) -> list[tuple[str, str]]:
        """Return the best passages, each with its location."""
        scores: dict[int, float] = defaultdict(float)
        for word in set(_words(query)):
            found = self._found.get(word, [])
            rare = math.log(1 + (len(self) - len(found) + 0.5) / (len(found) + 0.5))
            for passage, count in found:
                length = 1 - B + B * self._lengths[passage] / self._mean
                scores[passage] += rare * count * (K1 + 1) / (count + K1 * length)
        best = sorted(scores, key=lambda passage: (-scores[passage], passage))
        return [self._passages[passage] for passage in best[:limit]]


def search_tool(folder: str) -> Callable[..., str]:
    """Return the tool for a directory. Raise ConfigError if there is no text in it."""
    where = f"rollout.tools = 'search:{folder}'"
    root = Path(folder).expanduser()
    if not folder or not root.is_dir():
        raise ConfigError(f'{where}: no such directory; write "search:DIRECTORY"')
    try:
        index = Index(root)
    except OverflowError:
        raise ConfigError(
            f"{where}: more than {MAX_BYTES >> 20} MB of text; choose a smaller directory"
        ) from None
    if not len(index):
        raise ConfigError(f"{where}: the directory has no text files")

    def search(query: str, limit: int = 3) -> str:
        """Search the documents and return the best passages, with their files and lines.

        Args:
            query: Words to look for.
            limit: Number of passages, at most 5.
        """
        found = index.search(query, max(1, min(limit, MAX_RESULTS)))
        shown = (f"{where}\n{text[:SHOWN_LENGTH]}" for where, text in found)
        return "\n\n".join(shown) or "nothing found; try other words"

    return search


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _passages(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the paragraphs of all text files; short neighbors are one passage."""
    size = 0
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if not path.is_file() or any(part.startswith(".") for part in name.parts):
            continue
        try:
            with path.open("rb") as file:
                if b"\0" in file.read(HEAD):
                    continue  # not text
            size += path.stat().st_size
            if size > MAX_BYTES:
                raise OverflowError
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            size -= path.stat().st_size
        except PermissionError:
            continue
        else:
            yield from _of_file(str(name), lines)


def _of_file(name: str, lines: list[str]) -> Iterator[tuple[str, str]]:
    begin, length = 0, 0
    for number, line in enumerate([*lines, ""]):
        ends = number == len(lines) or (not line.strip() and length > PASSAGE_LENGTH // 2)
        if ends or length + len(line) > PASSAGE_LENGTH:
            text = "\n".join(lines[begin:number]).strip()
            if text:
                yield f"{name}:{begin + 1}", text
            begin, length = number, 0
        length += len(line) + 1
