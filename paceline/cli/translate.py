"""The commands about recipes: list the built-in ones, translate those of verl."""

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from paceline.cli.app import app, console, errors, fail
from paceline.errors import ConfigError, PacelineError

if TYPE_CHECKING:
    from paceline.translate.source import Translation


@app.command()
def recipes() -> None:
    """List the built-in recipes. `paceline train NAME` runs one."""
    from paceline.recipe import built_in_recipes, describe_recipe

    known = built_in_recipes()
    width = max(map(len, known), default=0) + 2
    for name, path in known.items():
        line = Text.assemble((f"{name:{width}}", "bold"), describe_recipe(path))
        console.print(line, highlight=False, soft_wrap=True)


@app.command(context_settings={"ignore_unknown_options": True})
def translate(
    given: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE_OR_OVERRIDES...",
            help="verl's YAML files, shell scripts or overrides, for example "
            "data.train_batch_size=64",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the recipe to this file.", show_default=False),
    ] = None,
) -> None:
    """Turn a configuration of verl into a recipe, and list what has no counterpart."""
    from paceline.translate.toml import recipe_text, remarks

    try:
        translation, values = _translate(given)
    except PacelineError as error:
        fail(error)
    text = recipe_text(translation, values, "verl's settings")
    if output is None:
        console.print(text, highlight=False, soft_wrap=True, end="")
    else:
        _write(output, text)
    for title, lines in remarks(translation, values):
        _remark("\n".join([f"{title}:", *(f"  {line}" for line in lines)]))
    try:
        _check(translation.settings)
    except ConfigError as error:
        _remark(f"The recipe cannot be trained as it is: {error}")
    if output is not None:
        _remark(f"wrote {output}; to run it: paceline train {quote(str(output))}")


def _remark(text: str) -> None:
    errors.print(text, highlight=False, soft_wrap=True)


def _translate(given: list[str]) -> "tuple[Translation, dict[str, Any]]":
    """Return the translation, and verl's settings by name."""
    from paceline.config import RunConfig, describe_settings, is_setting, split_settings
    from paceline.hints import suggest
    from paceline.translate.verl import drop_without_effect, translate

    own, foreign = split_settings(_read(given))
    translation = translate(foreign, own, complete=True)
    for name, value in own.items():
        if not is_setting(name):
            translation.missing[name] = f"unknown; {suggest(name, RunConfig)}"
        elif value is not None:
            translation.settings.setdefault(name, value)
    drop_without_effect(translation, {})
    position = {name: place for place, (name, _, _) in enumerate(describe_settings())}
    translation.settings = dict(
        sorted(translation.settings.items(), key=lambda item: position.get(item[0], 0))
    )
    return translation, foreign | own


def _read(given: list[str]) -> dict[str, Any]:
    """Return the settings in files and overrides, later ones over earlier ones."""
    from paceline.recipe import YAML, read_recipe
    from paceline.translate.hydra import flatten, read_overrides, read_script
    from paceline.translate.source import PROGRAM

    found: dict[str, Any] = {}
    words = []
    for word in given:
        path = Path(word)
        is_override = ("=" in word or word.startswith("~")) and not path.is_file()
        if is_override:  # its value may be the path of a YAML file
            found = read_overrides([word], found)
        elif path.suffix in YAML:
            found |= dict(flatten(read_recipe(path)))
        elif path.is_file():
            found = read_script(_read_text(path), found)
        else:
            words.append(word)
    found = read_script(" ".join(words), found)  # python3 -m verl.trainer.main_ppo
    if found.keys() <= {PROGRAM}:
        for word in words:
            if Path(word).suffix in (".sh", ".bash"):
                raise ConfigError(f"there is no file {word!r} (in {Path.cwd()})")
        raise ConfigError(
            f"{' '.join(given)!r} has no settings of verl; expected a .yaml or .sh file, or "
            "overrides such as data.train_batch_size=64"
        )
    return found


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}; expected a shell script in UTF-8"
        ) from None


def _write(output: Path, text: str) -> None:
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(
            ConfigError(
                f"--output {output} cannot be written: {error.strerror}; expected a file in an "
                "existing directory"
            )
        )


def _check(settings: dict[str, Any]) -> None:
    from paceline.config import check_trainable, load_config

    check_trainable(load_config(values=settings))
