"""Architecture: packages import only downwards, heavy libraries have one leaf, `_names` are
private.

The test reads syntax trees, so it also counts imports inside functions.
"""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.config import TRACKERS

PACKAGE = Path(__file__).parents[2] / "paceline"

# From the bottom to the top. A unit may import units of lower layers and its own package; units of
# one layer are independent of each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("secret_variables",),
    ("printable",),
    (
        "__init__",
        "types",
        "checksum",
        "errors",
        "settings",
        "code_search",
        "collection",
        "notifier",
        "suspend",
        "openmp",
        "heap",
        "progress",
        "temporary",
        "version",
    ),
    ("file_lock",),
    ("plugins", "schedule", "placement", "recipe", "hints", "background", "line_file", "sandbox"),
    ("model", "remote", "auditor"),
    ("data", "algo", "queue"),
    ("reward", "sync"),
    ("environment",),
    ("endpoint",),
    ("rollout", "training"),
    ("translate",),
    ("config",),
    ("workers",),
    (
        "inputs",
        "control",
        "synchronizer",
        "early_checks",
        "weight_check",
        "group_metrics",
        "watchdog",
        "timeline",
    ),
    ("tasks",),
    ("generation", "loop", "run_dir", "script", "held_out"),
    ("observe", "page"),
    ("simulator",),
    ("start",),
    ("run", "evaluation", "replay"),
    ("job", "supervisor", "doctor", "serving"),
    ("supervised",),
    ("api",),
    ("cli", "trl"),
    ("__main__",),
)
LEVEL = {unit: level for level, units in enumerate(LAYERS) for unit in units}

# The modules or packages that may import a library; for torch, the modules that must not.
LEAVES = {
    "vllm": {"rollout.vllm"},
    "ray": {"workers.ray"},
    "megatron": {"training.megatron"},
    "peft": {"training.lora"},
    "pyarrow": {"data.files"},
    "datasets": {"data.hub"},
    "gguf": {"model.gguf_conversion"},
    **{
        name: {f"environment.adapters.{name}"}
        for name in ("verifiers", "reasoning_gym", "gymnasium", "openenv")
    },
    "rich": {"cli", "observe.completions", "observe.display", "observe.plan", "observe.samples"}
    | {"observe.console", "observe.terminal", "supervised.display"},
    "typer": {"cli"},
    "aiohttp": {"endpoint.server", "reward.judge"},
    "openai": {"endpoint.agent"},
    **{name: {f"observe.trackers.{name}"} for name in TRACKERS},
}
HEAVY = {"torch", "transformers"}
WITHOUT_TORCH = ("paceline.cli", "paceline.config", "paceline.control", "paceline.loop")
WITHOUT_TORCH += ("paceline.observe.display", "paceline.observe.samples", "paceline.early_checks")
WITHOUT_TORCH += ("paceline.doctor", "paceline.workers.pools")


def modules(root: Path) -> dict[str, ast.Module]:
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text())
    return found


@functools.cache
def imports(tree: ast.AST) -> list[tuple[str, str]]:
    """Return (module, imported name) of every import, also in functions and under TYPE_CHECKING."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [(node.module, alias.name) for alias in node.names]
    return found


def imported_modules(tree: ast.AST, known: set[str]) -> Iterator[str]:
    """Yield the modules of the package that a module imports, without the package's name."""
    for module, name in imports(tree):
        if module == "paceline" or module.startswith("paceline."):
            inside = module.removeprefix("paceline").removeprefix(".")
            full = f"{inside}.{name}".strip(".")
            yield full if full in known else inside or "__init__"


def unit(module: str) -> str:
    return module.split(".")[0]


def upward(trees: dict[str, ast.Module]) -> list[str]:
    return [
        f"{module} imports {other}"
        for module, tree in trees.items()
        for other in imported_modules(tree, set(trees))
        if unit(other) != unit(module)
        and LEVEL[unit(other)] >= LEVEL[unit(module)]
        and module != "__init__"  # its imports are for type checkers; names are resolved on use
    ]


def misplaced(trees: dict[str, ast.Module]) -> list[str]:
    return [
        f"{module} imports {library}"
        for module, tree in trees.items()
        for library, _ in imports(tree)
        if not module.startswith(tuple(LEAVES.get(library.split(".")[0], {module})))
    ]


def private(trees: dict[str, ast.Module]) -> list[str]:
    """Return uses of `_names` of another module, imported or reached through that module."""
    found = []
    for module, tree in trees.items():
        known = set(trees)
        found += [
            f"{module} imports {source}.{name}"
            for source, name in imports(tree)
            if source.startswith("paceline") and name.startswith("_") and name != "__version__"
        ]
        aliases = {
            name
            for source, name in imports(tree)
            if f"{source}.{name}".removeprefix("paceline.") in known
        }
        found += [
            f"{module} uses {node.value.id}.{node.attr}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in aliases
            and node.attr.startswith("_")
            and not node.attr.startswith("__")
        ]
    return found


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return modules(PACKAGE)


def test_every_unit_has_layer(trees: dict[str, ast.Module]) -> None:
    assert {unit(module) for module in trees} == set(LEVEL)


def test_packages_import_only_lower_layers(trees: dict[str, ast.Module]) -> None:
    assert upward(trees) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("training.single", "from paceline.rollout.engine import RolloutEngine"),
        ("queue.ledger", "import paceline.loop"),
        ("model.loading", "def f():\n    from paceline.data.tiny import resolve_model"),
    ],
)
def test_layer_check_fails_when_upward_import_is_planted(
    trees: dict[str, ast.Module], module: str, line: str
) -> None:
    assert len(upward(trees | {module: ast.parse(line)})) == 1


def test_heavy_library_is_imported_only_in_its_leaf(trees: dict[str, ast.Module]) -> None:
    assert misplaced(trees) == []
    assert len(misplaced(trees | {"loop": ast.parse("import ray.util")})) == 1


def test_private_names_stay_in_their_module(trees: dict[str, ast.Module]) -> None:
    assert private(trees) == []
    planted = ast.parse("from paceline.training import head\nhead._secret()")
    assert len(private(trees | {"training.fused": planted})) == 1


def test_command_line_does_not_wait_for_torch() -> None:
    """Help, errors in a recipe and commands for a running job need no torch."""
    program = f"import sys, {', '.join(WITHOUT_TORCH)}; print({HEAVY!r} & sys.modules.keys())"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout == "set()\n", result.stderr
