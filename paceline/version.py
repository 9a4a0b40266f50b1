"""Version, commit and backends of this installation, without importing any of them."""

import subprocess
from importlib import metadata
from pathlib import Path

PACKAGE = "paceline"
COMMIT_FILE = "commit.txt"  # beside this file; hatch_build.py adds it to sdist and wheel
# Packages that engines, train backends and clusters come from.
BACKENDS = {
    "torch": "native engine; training on one device and with FSDP2",
    "transformers": "models",
    "vllm": "rollout.engine = vllm",
    "megatron-core": "train.backend = megatron",
    "ray": "cluster = ray",
    "peft": "train.lora",
}


def installed(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# A plain copy of the source, on PYTHONPATH without an installation, does not know its version.
__version__: str = installed(PACKAGE) or "0.0.0+unknown"


def commit() -> str | None:
    """Return the commit of a clone, or the one that the installed package was built from."""
    return commit_of_clone() or _commit_of_build()


def describe() -> list[str]:
    """Return the lines of `paceline --version`."""
    lines = [
        f"paceline {__version__}",
        f"commit {commit() or 'unknown: not built from a git clone'}",
    ]
    for package, purpose in BACKENDS.items():
        lines.append(f"{package} {installed(package) or 'not installed'} ({purpose})")
    return lines


def commit_of_clone() -> str | None:
    """Return the commit of the clone that this file is in, or None if it is in no clone."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():  # a package in the directory of another project
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _commit_of_build() -> str | None:
    path = Path(__file__).with_name(COMMIT_FILE)
    return path.read_text().strip() if path.exists() else None
