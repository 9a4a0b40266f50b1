"""All checks, for this machine or for a recipe on it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import quote

from paceline.config import RunConfig, check_trainable, load_config
from paceline.doctor.devices import check_devices
from paceline.doctor.finding import Finding, ok, problem
from paceline.doctor.machine import check_machine
from paceline.doctor.versions import check_versions
from paceline.early_checks import check_early
from paceline.errors import PacelineError
from paceline.types import Role

PYTHON_TESTS = "python_tests"  # the verifier that runs code of the model


def examine(recipe: str | Path | None = None, settings: Sequence[str] = ()) -> Iterator[Finding]:
    """Yield the findings; with a recipe, also whether this machine has what it needs.

    Raise ConfigError if the recipe does not exist or has wrong settings.
    """
    config = load_config(recipe, settings) if recipe is not None else None
    yield from check_versions()
    yield from check_devices(min_gpus=config.placement.min_gpus if config else 0)
    if config is None:
        yield from check_machine(Path("runs"))
        return
    yield from check_machine(
        Path(config.run_dir),
        weights_bytes=_shared_weights(config),
        needs_sandbox=_runs_code(config),
    )
    yield _check_recipe(str(recipe), config)


def _check_recipe(recipe: str, config: RunConfig) -> Finding:
    try:
        check_trainable(config)
        check_early(config)
    except PacelineError as error:
        return problem("recipe", str(error), f"change {recipe}, or give the setting as key=value")
    text = f"{recipe}: model, data, reward, packages and run directory are there"
    return ok("recipe", f"{text} (memory: paceline plan {quote(str(recipe))})")


def _runs_code(config: RunConfig) -> bool:
    chosen = config.reward.function
    functions = (chosen,) if isinstance(chosen, str) else chosen or ()
    return PYTHON_TESTS in functions and not config.reward.allow_weak_sandbox


def _shared_weights(config: RunConfig) -> int:
    """Return the bytes that a sync between processes puts into shared memory, where known."""
    folder = Path(config.model).expanduser()
    if config.placement.shared(Role.ACTOR, Role.ROLLOUT) or not folder.is_dir():
        return 0
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
