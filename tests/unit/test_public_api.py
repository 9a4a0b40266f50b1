"""The public API: every name and signature, so that a change of one is a decision."""

import inspect
import subprocess
import sys
from collections.abc import Mapping
from operator import attrgetter

import pytest

import paceline
import paceline.trl.rewards
from paceline import errors, trl
from paceline.settings import Settings

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
    "Steps": {"run", "stop"},
    "AuditReport": {"run_dir", "problems", "notes", "counts", "ok", "to_json", "add"},
    "Environment": {"reset", "step", "close"},
    "AgentLoop": {"run"},
    "Generate": set(),
}
# Fields of the constructor, and what can be read in addition to them.
CONSTRUCTORS = {
    "Batch": "tokens, lengths, mask, logprobs, versions, rewards, groups, advantages=None, "
    "returns=None, values=None, ref_logprobs=None, truncated=None, token_rewards=None, "
    "baselines=None, trajectories=None",
    "Completion": "tokens, logprobs, versions, finish",
    "Group": "seq, prompt, trajectories, started_s, finished_s, baseline=None",
    "Prompt": "uid, tokens, text, row",
    "Reply": "messages=(), reward=0.0, done=False",
    "Run": "run_dir, summary",
    "Step": "step, reward, metrics, groups",
    "Trajectory": "turns, text, reward=None, details=<factory>, end=None, agent=''",
    "Turn": "prompt, completion, reward=0.0, restarts=False",
}
PROPERTIES = {
    "Batch": {"num_rows", "num_tokens", "offsets"},
    "Group": {"version_min", "num_tokens"},
    "Run": {"checkpoint", "metrics"},
    "Trajectory": {"rows", "version_min", "num_tokens", "total_reward", "scored"},
}
METHODS = {
    "AgentLoop.run": "self, prompt, generate",
    "Environment.reset": "self, row",
    "Environment.step": "self, message",
    "Environment.close": "self",
    "Generate.__call__": "self, context, *, max_new_tokens=None, stop=()",
    "Steps.stop": "self",
    "Trajectory.scored": "self, reward, details=None",
}
SECTIONS = {"data", "evaluation", "reward", "rollout", "fleet", "queue", "algorithm", "train"}
SECTIONS |= {"schedule", "sync", "placement", "ray"}
SETTINGS = {"model", "run_dir", "seed", "steps", "groups_per_step", "group_size", "cluster"}
SETTINGS |= {"save_every", "save_every_s", "keep_checkpoints", "save_samples", "save_in_flight"}
SETTINGS |= {"grace_s", "step_timeout_s", "start_timeout_s", "stall_timeout_s"}
SETTINGS |= {"track", "trace", "profile_steps", "prediction"}
TRAINER = "model, reward_funcs=None, args=None, train_dataset=None, eval_dataset=None, "
TRAINER += "processing_class=None, reward_processing_classes=None, callbacks=None, "
TRAINER += "optimizers=(None, None), quantization_config=None, peft_config=None, tools=None, "
TRAINER += "rollout_func=None, environment_factory=None"
TRL = {
    "GRPOConfig": "output_dir=None, *, paceline=None, **fields",
    "GRPOTrainer": TRAINER,
    "GRPOTrainer.train": "self, resume_from_checkpoint=None",
    "GRPOTrainer.evaluate": "self, eval_dataset=None, metric_key_prefix='eval'",
    "GRPOTrainer.save_model": "self, output_dir=None, _internal_call=False",
    "GRPOTrainer.add_callback": "self, callback",
    "GRPOTrainer.remove_callback": "self, callback",
    "GRPOTrainer.is_world_process_zero": "self",
    "GRPOTrainer.is_local_process_zero": "self",
    "GRPOTrainer.create_model_card": "self, _args, **_fields",
    "GRPOTrainer.push_to_hub": "self, _args, **_fields",
    "GRPOTrainer.save_state": "self",
    "GRPOTrainer.save_metrics": "self, split, metrics",
    "GRPOTrainer.log_metrics": "self, split, metrics",
    "rewards.accuracy_reward": "completions, solution, **kwargs",
    "rewards.think_format_reward": "completions, **kwargs",
    "rewards.get_soft_overlong_punishment": "max_completion_len, soft_punish_cache",
}
TYPES = {"RunConfig", "PacelineError", "AgentLoop", "Environment", "Generate"}
TYPES |= {"Batch", "Completion", "Group", "Prompt", "Score", "Steps", "Trajectory", "Turn"}
DEFAULTS = {"display": True, "fresh": False, "samples": 1, "overrides": ()}


SANDBOX = "code, *, stdin, timeout_s, cpu_s, memory_mb, processes, output_kb, disk_mb"


def names_of(function: object, defaults: bool = False) -> str:
    names, star = [], False
    for parameter in inspect.signature(function).parameters.values():  # type: ignore[arg-type]
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            names.append("*")
            star = True
        name = f"**{parameter.name}" if parameter.kind is parameter.VAR_KEYWORD else parameter.name
        has_default = defaults and parameter.default is not parameter.empty
        names.append(f"{name}={parameter.default!r}" if has_default else name)
    return ", ".join(names)


def public_members(kind: type) -> set[str]:
    members = {*dir(kind), *getattr(kind, "__dataclass_fields__", ())}
    return {member for member in members if not member.startswith("_")}


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


def test_defaults_of_steps_are_those_of_train_without_display() -> None:
    train, steps = (dict(inspect.signature(f).parameters) for f in (paceline.train, paceline.steps))
    assert steps.pop("display").default is False and train.pop("display").default is True
    assert {name: p.default for name, p in steps.items()} == {
        name: p.default for name, p in train.items()
    }


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_fields_of_public_type_are_pinned(name: str) -> None:
    kind = getattr(paceline, name)
    assert names_of(kind, defaults=True) == CONSTRUCTORS[name]
    fields = set(inspect.signature(kind).parameters)
    assert public_members(kind) == fields | PROPERTIES.get(name, set())


@pytest.mark.parametrize("name", METHODS)
def test_method_of_public_type_is_pinned(name: str) -> None:
    assert names_of(attrgetter(name)(paceline), defaults=True) == METHODS[name]


def test_score_is_number_or_named_numbers() -> None:
    assert paceline.Score == float | Mapping[str, float]


def test_sections_of_settings_are_pinned() -> None:
    fields = paceline.RunConfig.model_fields
    sections = {
        name
        for name, field in fields.items()
        if inspect.isclass(field.annotation) and issubclass(field.annotation, Settings)
    }
    assert sections == SECTIONS and set(fields) == SECTIONS | SETTINGS


@pytest.mark.parametrize("name", TRL)
def test_signature_of_trl_is_pinned(name: str) -> None:
    assert names_of(attrgetter(name)(trl), defaults=True) == TRL[name]


def test_trl_exports_exactly_public_names() -> None:
    assert set(trl.__all__) == {"GRPOConfig", "GRPOTrainer"}
    methods = {name.partition(".")[2] for name in TRL if name.startswith("GRPOTrainer.")}
    assert public_members(trl.GRPOTrainer) == methods | {"model", "processing_class"}
    fields = {*trl.config.DEFAULTS, "paceline"}
    assert public_members(trl.GRPOConfig) == fields | {"check", "to_dict"}
    own = {name for name, value in vars(trl.rewards).items() if inspect.isfunction(value)}
    assert {f"rewards.{name}" for name in own - {"boxed"}} == {n for n in TRL if "rewards." in n}


@pytest.mark.parametrize("name", MEMBERS)
def test_public_members_are_pinned(name: str) -> None:
    assert public_members(getattr(paceline, name)) == MEMBERS[name]


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
