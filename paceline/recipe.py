"""Recipes: TOML or YAML files of settings, found by path or by the name of a built-in one."""

import difflib
import json
import tomllib
from os import PathLike
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError

YAML = (".yaml", ".yml")


def built_in_recipes() -> dict[str, Path]:
    """Return the built-in recipes by name."""
    package = Path(__file__).parent
    # A wheel has them in the package; an editable installation uses those of the repository.
    homes = (package / "recipes", package.parent / "recipes")
    home = next((home for home in homes if home.is_dir()), homes[0])
    return {path.stem: path for path in sorted(home.glob("*.toml"))}


def find_recipe(name: str | Path) -> Path:
    """Return the file of a recipe: an existing file, or a built-in recipe of that name.

    Raise ConfigError if there is none.
    """
    if not isinstance(name, str | PathLike):
        raise ConfigError(
            f"the recipe is {type(name).__name__}; expected the name or path of one. Pass settings "
            "by their names: train(steps=10, rollout={...})"
        )
    path, known = Path(name).expanduser(), built_in_recipes()
    if path.is_file():
        return path
    # "recipes/hybrid.toml" is the repository's path of a built-in recipe.
    short = str(path).removeprefix("recipes/").removesuffix(".toml")
    if short in known:
        return known[short]
    if path.is_dir():
        meant = (
            f". To train this model, set model={name}" if (path / "config.json").exists() else ""
        )
        raise ConfigError(f"recipe {name} is a directory; expected a TOML or YAML file{meant}")
    if "=" in str(name):
        raise ConfigError(
            f"{str(name)!r} is a setting, not a recipe; name a recipe first. "
            "`paceline recipes` lists the built-in ones"
        )
    meant = f". To train a model of this name, set model={name}" if _may_be_model(path) else ""
    raise ConfigError(f"recipe {name} does not exist{_similar(path, short, known)}{meant}")


def read_recipe(path: Path) -> dict[str, Any]:
    """Return the settings of a file as nested dicts. Raise ConfigError if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows write a mark first
        if path.suffix not in YAML:
            return tomllib.loads(text)
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"recipe {path} cannot be read: {error}") from None
    except ValueError as error:  # also: an integer with thousands of digits
        raise ConfigError(f"recipe {path} is not valid TOML: {error}") from None
    return _read_yaml(path, text)


def describe_recipe(path: Path) -> str:
    """Return the first sentence of the comment at the top of a recipe."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = []
    for line in lines:
        if not line.startswith("#"):
            break
        comment.append(line.removeprefix("#").strip())
    return " ".join(comment).split(". ")[0].rstrip(".")


def _read_yaml(path: Path, text: str) -> dict[str, Any]:
    import yaml  # most recipes do not need it

    try:
        values = yaml.safe_load(text)
        json.dumps(values, default=str, skipkeys=True)  # raises if an alias contains itself
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"recipe {path} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        found = "is empty" if values is None else f"is a {type(values).__name__}"
        raise ConfigError(f"recipe {path} {found}; expected settings, for example steps: 100")
    return values


def _may_be_model(path: Path) -> bool:
    """Return whether a name has the form of a Hugging Face model ID."""
    return len(path.parts) == 2 and path.suffix not in (".toml", *YAML)


def _similar(path: Path, short: str, known: dict[str, Path]) -> str:
    """Suggest a file next to a path, or a built-in recipe."""
    near = sorted(str(p) for p in path.parent.glob("*") if p.suffix in (".toml", *YAML))
    close = difflib.get_close_matches(str(path), near, n=1, cutoff=0.5)
    close = close or difflib.get_close_matches(short, known, n=1)
    bare = path.parent == Path() and not path.suffix
    names = f"uilt-in recipes: {', '.join(known)}" if bare or not close else ""
    if close:
        return f"; did you mean {close[0]}?" + (f" B{names}" if names else "")
    return f"; b{names}"
