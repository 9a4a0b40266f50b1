"""The site builds without warnings, has every page, and loads nothing from other servers."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline.config import RunConfig, describe_settings
from tests.docs.documents import ROOT

LOADED = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=["'](?:https?:)?//[^"']+""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make docs` does: a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_site_has_every_page_in_navigation(site: Path) -> None:
    """Pages that mkdocs.yml does not list are under "More"."""
    navigation = re.findall(r'href="([\w/]+\.html)"', (site / "index.html").read_text())
    docs = ROOT / "docs"
    pages = [path.relative_to(docs) for path in (*docs.rglob("*.md"), *docs.rglob("*.ipynb"))]
    missing = {str(page.with_suffix(".html")) for page in pages} - set(navigation)
    assert not missing, f"add to nav of mkdocs.yml: {sorted(missing)}"


def test_site_loads_nothing_from_other_servers(site: Path) -> None:
    loaded = {found for page in site.rglob("*.html") for found in LOADED.findall(page.read_text())}
    assert not loaded


def test_site_shows_lists_as_lists(site: Path) -> None:
    """Unlike GitHub, the site needs an empty line between a paragraph and a list."""
    paragraph = re.compile(r"<p>((?:(?!</p>).)*?\n *(?:-|1\.) (?:(?!</p>).)*)</p>", re.DOTALL)
    pages = [page for page in site.rglob("*.html") if "files" not in page.relative_to(site).parts]
    found = {page.name: match[1] for page in pages if (match := paragraph.search(page.read_text()))}
    assert not found, f"add an empty line before the list: {found}"


def test_site_finds_settings_and_public_names_by_search(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    found = " ".join(entry["title"] + " " + entry["text"] for entry in index["docs"])
    names = [name for name, *_ in describe_settings("", RunConfig)]
    assert not [name for name in names if name not in found]
    html = (site / "reference.html").read_text()
    public = [name for name in paceline.__all__ if name not in ("__version__", "sandbox")]
    assert not [name for name in public if f'id="paceline.{name}"' not in html]


def test_drawings_are_those_of_their_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import drawings

    monkeypatch.setattr(drawings, "IMAGES", tmp_path)
    monkeypatch.setattr(sys, "argv", ["drawings.py"])
    drawings.main()
    for path in tmp_path.iterdir():
        committed = (ROOT / "docs" / "images" / path.name).read_text()
        assert path.read_text() == committed, f"run: python docs/drawings.py ({path.name})"
