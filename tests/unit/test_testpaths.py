"""Repository layout: test directories, `make clean`, the tree in the documentation.

`make test` collects all test directories except those that need other packages.
"""

import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_test_directory_has_command() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = pyproject["tool"]["pytest"]["ini_options"]["testpaths"]
    found = {str(path.parent.relative_to(ROOT)) for path in ROOT.glob("tests/*/__init__.py")}
    others = {"bench", "browser", "docs", "environments", "megatron", "ray", "track", "vllm"}
    assert found - set(listed) == {f"tests/{name}" for name in others}


def test_make_clean_keeps_runs() -> None:
    dry_run = ["make", "-n", "clean"]
    output = subprocess.run(dry_run, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert ".venv" in output and "runs" not in output


def units() -> set[str]:
    """Return the modules and packages at the top of the package."""
    found = (ROOT / "paceline").iterdir()
    named = {path.stem for path in found if path.suffix == ".py" or (path / "__init__.py").exists()}
    return {name for name in named if not name.startswith("__")}


def test_layers_of_architecture_are_those_of_package() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.partition("## Layers")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {name for cell in cells for name in re.findall(r"`([a-z_]+)/?`", cell)}
    differ = sorted(named ^ units())
    assert not differ, f"in the first column of the table or in the package, not in both: {differ}"


def test_source_tree_of_readme_has_every_unit() -> None:
    tree = (ROOT / "README.md").read_text().partition("## Source tree")[2].split("```")[1]
    missing = sorted(units() - set(re.findall(r"\b([a-z_]+)(?:/|\.py)(?=\s)", tree)))
    assert not missing, f"add to the source tree of README.md: {missing}"


def test_architecture_names_existing_files() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    paths = set(re.findall(r"`([a-z_/]+\.py)`", text))
    assert [path for path in paths if not (ROOT / "paceline" / path).exists()] == []
