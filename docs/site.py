"""Pages of the site that have no file in docs/, and links that leave docs/ (a hook of MkDocs).

README.md is the first page. Settings, recipes and public names are generated from the package. A
file of the repository that a page links to gets a page with its text. So every link of GitHub works
on the site, without a network.
"""

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import paceline
from paceline.config import RunConfig, describe_settings
from paceline.recipe import built_in_recipes, describe_recipe
from paceline.supervised.config import SftConfig

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
TOP_PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
    "results.md": "benchmarks/results/gpu.md",
    "benchmarks.md": "benchmarks/README.md",
    "files/code_of_conduct.md": "CODE_OF_CONDUCT.md",
}
SITE_PAGES = {repository: site for site, repository in TOP_PAGES.items()}
LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "bash", ".yml": "yaml", ".yaml": "yaml"}


def on_config(config: MkDocsConfig) -> None:
    """Add pages that the navigation in mkdocs.yml does not have."""
    listed = set(re.findall(r"[\w/]+\.md", json.dumps(config.nav)))
    found = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    if more := sorted(found - listed):
        config.nav = [*(config.nav or []), {"More": more}]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {name: (ROOT / path).read_text() for name, path in TOP_PAGES.items()}
    pages |= {
        "recipes.md": recipes_page(),
        "reference.md": reference_page(),
        "settings.md": settings_page(),
    }
    for path in DOCS.glob("tutorials/*.ipynb"):
        pages[f"tutorials/{path.stem}.md"] = notebook_page(path)
    texts = {path.relative_to(DOCS).as_posix(): path.read_text() for path in DOCS.rglob("*.md")}
    for name, text in (pages | texts).items():
        for path in linked_files(name, text):
            target = site_path(path)
            if target.startswith("files/") and target not in TOP_PAGES:
                pages[target] = source_page(path)
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = page.file.src_uri
    if source.startswith("files/") and source not in TOP_PAGES:
        return markdown

    def changed(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(origin(source), link[2]))
        target = posixpath.relpath(site_path(path), posixpath.dirname(source) or ".")
        return f"{link[1]}{target}{link[3] or ''}"

    parts = parts_of(markdown)
    parts[::2] = [LINK.sub(changed, part) for part in parts[::2]]
    return "".join(parts)


def parts_of(markdown: str) -> list[str]:
    """Return a text in parts: every second one is a code block."""
    return re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.MULTILINE | re.DOTALL)


def origin(page: str) -> str:
    """Return the directory of the repository that the links of a page start from."""
    return posixpath.dirname(TOP_PAGES.get(page, f"docs/{page}"))


def linked_files(page: str, text: str) -> Iterator[str]:
    for link in LINK.finditer("".join(parts_of(text)[::2])):
        yield posixpath.normpath(posixpath.join(origin(page), link[2]))


def site_path(path: str) -> str:
    """Return the page or picture of the site for a file of the repository."""
    if path in SITE_PAGES:
        return SITE_PAGES[path]
    if path.startswith("docs/") and path.endswith(".ipynb"):
        return path.removeprefix("docs/").removesuffix(".ipynb") + ".md"
    if path.startswith("docs/") and not path.endswith(".py"):
        return path.removeprefix("docs/")
    return f"files/{path}.md"


def source_page(path: str) -> str:
    """Return a page with the text of a file, or with the names in a directory."""
    file = ROOT / path
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n"
    if file.is_dir():
        names = sorted(item.name for item in file.iterdir() if not item.name.startswith((".", "_")))
        return head + "\n".join(f"- `{name}`" for name in names) + "\n"
    return f"{head}````{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text()}\n````\n"


def notebook_page(path: Path) -> str:
    cells = json.loads(path.read_text())["cells"]
    texts = (("".join(cell["source"]), cell["cell_type"]) for cell in cells)
    return "\n\n".join(
        f"```python\n{text}\n```" if kind == "code" else text for text, kind in texts
    )


def settings_page() -> str:
    lines = ["# Settings", "", "Generated from `paceline settings` and `paceline settings --sft`."]
    for title, model in (("paceline train", RunConfig), ("paceline sft", SftConfig)):
        lines += ["", f"## `{title}`", "", "| Setting | Default | Meaning |", "|---|---|---|"]
        for name, default, meaning in describe_settings("", model):
            meaning = meaning.replace("|", "\\|")
            lines.append(f"| `{name}` | `{default}` | {meaning} |")
    return "\n".join(lines) + "\n"


def recipes_page() -> str:
    head = [
        "# Recipes",
        "",
        "`paceline train NAME` runs a built-in recipe; `paceline recipes` lists",
    ]
    lines = [*head, "them. Copy the nearest one for your model and data.", ""]
    for name, path in built_in_recipes().items():
        lines += [f"## {name}", "", describe_recipe(path), ""]
        lines += ["```toml", path.read_text().rstrip(), "```", ""]
    return "\n".join(lines)


def reference_page() -> str:
    names = [name for name in paceline.__all__ if name not in ("__version__", "sandbox")]
    head = ["# Public names", "", "Generated from the names that `import paceline` gives."]
    body = [f"::: paceline.{name}\n" for name in sorted(names, key=str.lower)]
    return "\n".join([*head, "", *body, "::: paceline.sandbox.run\n"])
