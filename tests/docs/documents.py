"""The documents of the repository, taken apart: code blocks, sections, links.

A comment before a code block is invisible to readers and tells the tests what it needs:

    <!-- needs: one GPU -->   checked, not run: it needs this hardware, software or time
    <!-- excerpt -->          a part of a program: it must be valid syntax, no more
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^( *)```(\w*)\s*$")
MARKER = re.compile(r"<!-- (needs: (?P<needs>.+?)|(?P<excerpt>excerpt)) -->")
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]*)\)")


def documents() -> list[Path]:
    """Return every page that people read, also those that a branch adds."""
    tops = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md")
    others = ("benchmarks/README.md", "benchmarks/results/gpu.md")
    return [*(ROOT / name for name in (*tops, *others)), *sorted((ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True, slots=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    needs: str | None
    is_excerpt: bool

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    lines = page.read_text().splitlines()
    found, start = [], 0
    while start < len(lines):
        fence = FENCE.match(lines[start])
        if fence is None:
            start += 1
            continue
        indent, language = fence.groups()
        end = next(
            (at for at in range(start + 1, len(lines)) if lines[at].strip() == "```"), len(lines)
        )
        marker = _marker_above(lines, start)
        text = "\n".join(line.removeprefix(indent) for line in lines[start + 1 : end]) + "\n"
        found.append(
            Block(
                page,
                start + 1,
                language,
                text,
                needs=marker["needs"] if marker else None,
                is_excerpt=bool(marker and marker["excerpt"]),
            )
        )
        start = end + 1
    return found


def _marker_above(lines: list[str], fence: int) -> re.Match[str] | None:
    above = next((lines[at] for at in range(fence - 1, -1, -1) if lines[at].strip()), "")
    return MARKER.fullmatch(above.strip())


def all_blocks(*languages: str) -> list[Block]:
    blocks = [block for page in documents() for block in blocks_of(page)]
    return [block for block in blocks if block.language in languages]


def printed_commands() -> list[Block]:
    """Return the blocks with a command and its output."""
    return [block for block in all_blocks("") if block.text.startswith("$ paceline ")]


def prose_of(page: Path) -> str:
    """Return the page without its code blocks and inline code."""
    kept, inside = [], False
    for line in page.read_text().splitlines():
        if line.lstrip().startswith("```"):
            inside = not inside
        elif not inside:
            kept.append(re.sub(r"`[^`]*`", "", line))
    return "\n".join(kept)


def slug(heading: str) -> str:
    """Return the anchor that GitHub and the site give to a heading."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
    text = re.sub(r"[^\w\- ]", "", text.strip().lower())
    return text.replace(" ", "-")


def sections_of(page: Path) -> dict[str, str]:
    """Return the text of each section by its anchor, with the sections below it."""
    headings: list[tuple[int, int, str]] = []
    inside = False
    lines = page.read_text().splitlines()
    for at, line in enumerate(lines):
        if line.lstrip().startswith("```"):
            inside = not inside
        elif not inside and (heading := re.match(r"(#+) (.*)", line)):
            headings.append((at, len(heading[1]), heading[2].replace("`", "")))
    sections: dict[str, str] = {}
    for index, (start, depth, heading_text) in enumerate(headings):
        later = (at for at, other, _ in headings[index + 1 :] if other <= depth)
        anchor, number = slug(heading_text), 1
        while anchor in sections:
            anchor, number = f"{slug(heading_text)}-{number}", number + 1
        sections[anchor] = "\n".join(lines[start : next(later, len(lines))])
    return sections


def parts_of(page: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of each section, without the sections below it."""
    start, inside = 0, False
    lines = page.read_text().splitlines()
    for at, line in enumerate(lines):
        inside ^= line.lstrip().startswith("```")
        if not inside and re.match("#+ ", line):
            yield start + 1, "\n".join(lines[start:at])
            start = at
    yield start + 1, "\n".join(lines[start:])


def links_of(page: Path) -> Iterator[tuple[str, str]]:
    """Yield path and anchor of every relative link; either may be empty."""
    for link in LINK.findall(prose_of(page)):
        path, _, anchor = link.partition("#")
        yield path, anchor
