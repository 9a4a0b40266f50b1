"""The public API: every name and signature, so that a change of one is a decision."""

import inspect
import subprocess
import sys

import pytest

import paceline
from paceline import errors

TRAIN = "recipe, *, model, data, evaluation_data, reward, steps, environment, fresh, "
TRAIN += "resume_from, display"
EVALUATE = "recipe, *, model, data, reward, samples, environment, **settings"
SFT = "recipe, *, model, data, validation, steps, epochs, fresh, resume_from, display, **settings"
SIGNATURES = {
    "train": f"{TRAIN}, **settings",
    "train_async": f"{TRAIN}, **settings",
    "steps": f"{TRAIN}, **settings",
    "evaluate": EVALUATE,
    "evaluate_async": EVALUATE,
    "sft": SFT,
    "sft_async": SFT,
    "load_config": "recipe, overrides, values",
    "audit": "run_dir",
    "AuditReport": "run_dir, problems, notes, counts",
    "Run": "run_dir, summary",
    "Step": "step, reward, metrics, groups",
    "Reply": "messages, reward, done",
}
MEMBERS = {
    "Run": {"run_dir", "summary", "checkpoint", "metrics"},
    "Step": {"step", "reward", "metrics", "groups"},
    "Reply": {"messages", "reward", "done"},
    "Steps": {"run", "stop"},
    "AuditReport": {"run_dir", "problems", "notes", "counts", "ok", "to_json", "add"},
}
TYPES = {"RunConfig", "PacelineError", "AgentLoop", "Environment", "Generate"}
TYPES |= {"Batch", "Completion", "Group", "Prompt", "Score", "Steps", "Trajectory", "Turn"}
DEFAULTS = {"display": True, "fresh": False, "samples": 1, "overrides": ()}


SANDBOX = "code, *, stdin, timeout_s, cpu_s, memory_mb, processes, output_kb, disk_mb"


def names_of(function: object) -> str:
    names, star = [], False
    for parameter in inspect.signature(function).parameters.values():  # type: ignore[arg-type]
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            names.append("*")
            star = True
        names.append(
            f"**{parameter.name}" if parameter.kind is parameter.VAR_KEYWORD else parameter.name
        )
    return ", ".join(names)


def test_package_exports_exactly_public_names() -> None:
    assert set(paceline.__all__) == {*SIGNATURES, *TYPES, "sandbox", "__version__"}
    assert all(hasattr(paceline, name) for name in paceline.__all__)
    assert set(paceline.__all__) <= set(dir(paceline))


@pytest.mark.parametrize("name", SIGNATURES)
def test_public_signature_is_pinned(name: str) -> None:
    assert names_of(getattr(paceline, name)) == SIGNATURES[name]


@pytest.mark.parametrize(
    "name",
    ["train", "train_async", "evaluate", "evaluate_async", "sft", "sft_async", "load_config"],
)
def test_public_defaults_are_pinned(name: str) -> None:
    for parameter in inspect.signature(getattr(paceline, name)).parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            assert parameter.default == DEFAULTS.get(parameter.name)


@pytest.mark.parametrize("name", MEMBERS)
def test_public_members_are_pinned(name: str) -> None:
    kind = getattr(paceline, name)
    members = {*dir(kind), *getattr(kind, "__dataclass_fields__", ())}
    assert {member for member in members if not member.startswith("_")} == MEMBERS[name]


def test_sandbox_is_pinned() -> None:
    assert set(paceline.sandbox.__all__) == {"ALLOW_WEAK", "Result", "check", "run"}
    assert names_of(paceline.sandbox.run) == f"{SANDBOX}, readable, allow_weak"
    members = {name for name in dir(paceline.sandbox.Result) if not name.startswith("_")}
    fields = {"stdout", "stderr", "exit_code", "stopped", "sandbox"}
    assert members == fields | {"ok", "timed_out", "truncated"}


def test_errors_are_those_of_exit_code_table() -> None:
    kinds = {name for name, kind in vars(errors).items() if inspect.isclass(kind)}
    assert all(issubclass(getattr(errors, name), paceline.PacelineError) for name in kinds)
    assert all(name in (errors.__doc__ or "") for name in kinds)


def test_unknown_name_is_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        paceline.tarin  # noqa: B018


def test_import_is_quick_and_loads_no_torch() -> None:
    program = (
        "import sys, time; start = time.process_time(); import paceline; "
        "took = time.process_time() - start; "
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'rich'} & set(sys.modules); "
        "assert not heavy, heavy; assert took <= 0.2, took"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_functions_keep_their_names_after_import_of_implementation() -> None:
    import paceline.evaluation
    import paceline.run
    import paceline.supervised.run
    import paceline.training.checkpoint

    assert callable(paceline.sft)
    assert callable(paceline.train) and callable(paceline.evaluate) and callable(paceline.steps)
