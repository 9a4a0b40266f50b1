"""Rules that concern several sections of a configuration."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.config import check_trainable, describe_settings, differences, load_config
from paceline.errors import ConfigError
from paceline.hints import FOREIGN_NAMES
from paceline.recipe import built_in_recipes, describe_recipe

TWO_STEPS = ["schedule.max_staleness=1", "schedule.sync_every=2"]


def test_sync_every_is_rejected_when_engine_shares_trainer_weights() -> None:
    with pytest.raises(ConfigError) as rejected:
        load_config(None, TWO_STEPS)
    assert "schedule.sync_every = 2" in str(rejected.value)
    assert "placement.rollout = placement.actor = 'main'" in str(rejected.value)


def test_sync_every_is_rejected_when_engines_free_their_weights() -> None:
    ranks = ["train.backend=fsdp", "train.offload=true"]
    with pytest.raises(ConfigError, match=r"sync_every = 2 contradicts train.offload = true"):
        load_config(None, [*TWO_STEPS, *ranks])
    load_config(None, [*TWO_STEPS, *ranks, "placement.rollout=other"])
    load_config(None, [*TWO_STEPS, "train.backend=fsdp"])


@pytest.mark.parametrize(
    "setting", ["placement.overlap=true", "placement.rollout=other", "train.lora.rank=4"]
)
def test_sync_every_is_accepted_when_engine_has_separate_weights(setting: str) -> None:
    assert load_config(None, [*TWO_STEPS, setting]).schedule.sync_every == 2


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("rollout.top_p=0.9", "rollout.top_p = 0.9"),
        ("rollout.top_k=5", "rollout.top_k = 5"),
        ("rollout.temperature=0", "rollout.temperature = 0"),
    ],
)
def test_sampling_filter_is_rejected_for_training_only(setting: str, named: str) -> None:
    config = load_config(None, [setting])
    with pytest.raises(ConfigError, match=named):
        check_trainable(config)


def test_values_are_nested_or_dotted_names() -> None:
    nested = load_config(values={"rollout": {"max_response_length": 9}, "train": {"lora": {}}})
    dotted = load_config(values={"rollout.max_response_length": 9, "train.lora.rank": 16})
    assert nested == dotted and nested.rollout.max_response_length == 9


@pytest.mark.parametrize("overrides", ["steps=3", {"steps": 3}])
def test_overrides_are_rejected_when_they_are_not_a_list(overrides: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected a list, .* a dict of settings as values="):
        load_config("hybrid", overrides)


def test_overrides_replace_values_of_program_and_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "own.toml"
    recipe.write_text("steps = 1\nseed = 1\ngroup_size = 5")
    config = load_config(recipe, ["steps=3"], {"total_training_steps": 2, "seed": 2})
    assert (config.steps, config.seed, config.group_size) == (3, 2, 5)


TABLE = {"learning_rate": 1e-6, "lora": {"rank": 4}}


@pytest.mark.parametrize(
    ("overrides", "values"),
    [
        (["train={learning_rate=1e-6, lora={rank=4}}"], None),
        (["train={learning_rate=1e-6}", "train.lora={rank=4}", "train={}", "train.lora={}"], None),
        ([], {"train": TABLE}),
        (["train.lora={}"], {"train": TABLE}),
        ([], {"train": TABLE, "train.lora": {}}),
    ],
)
def test_table_is_merged_into_section_of_recipe(
    tmp_path: Path, overrides: list[str], values: dict[str, Any] | None
) -> None:
    recipe = tmp_path / "own.toml"
    recipe.write_text("[train]\nlearning_rate = 1\nweight_decay = 0.5\nlora.alpha = 3")
    train = load_config(recipe, overrides, values).train
    assert train.lora is not None
    assert (train.learning_rate, train.weight_decay) == (1e-6, 0.5)
    assert (train.lora.rank, train.lora.alpha) == (4, 3)


def test_table_replaces_alternative_of_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "own.toml"
    recipe.write_text('[data]\ntask = "sort:5"\nlimit = 7')
    data = load_config(recipe, ['data={path="a.jsonl"}']).data
    assert (data.task, data.path, data.limit) == (None, "a.jsonl", 7)


def test_empty_table_clears_setting_that_is_table(tmp_path: Path) -> None:
    recipe = tmp_path / "own.toml"
    recipe.write_text('[rollout]\nenvironment = "countdown"\nenvironment_args = {a = 1}')
    assert load_config(recipe, ["rollout.environment_args={}"]).rollout.environment_args == {}


@pytest.mark.parametrize(
    ("overrides", "values"),
    [
        (['rollout.environment_args={"x.y"=2}'], None),
        (['rollout={environment_args={"x.y"=2}}'], None),
        ([], {"rollout.environment_args": {"x.y": 2}}),
        ([], {"rollout": {"environment_args": {"x.y": 2}}}),
    ],
)
def test_table_replaces_setting_that_is_table(
    tmp_path: Path, overrides: list[str], values: dict[str, Any] | None
) -> None:
    recipe = tmp_path / "own.toml"
    recipe.write_text('[rollout]\nenvironment = "countdown"\nenvironment_args = {a = 1}')
    config = load_config(recipe, overrides, values)
    assert config.rollout.environment_args == {"x.y": 2}


def test_dotted_name_sets_one_key_of_setting_that_is_table(tmp_path: Path) -> None:
    recipe = tmp_path / "own.toml"
    recipe.write_text('[rollout]\nenvironment = "countdown"\nenvironment_args."x.y" = {a = 1}')
    values = {"rollout.environment_args": {"b": {"c": 1}}}
    given = load_config(recipe, ["rollout.environment_args.b.c=2"], values)
    assert given.rollout.environment_args == {"b": {"c": 2}}
    assert values == {"rollout.environment_args": {"b": {"c": 1}}}
    added = load_config(recipe, ["rollout.environment_args.b=2"])
    assert added.rollout.environment_args == {"x.y": {"a": 1}, "b": 2}


def test_value_replaces_alternative_of_recipe_unless_it_is_none(tmp_path: Path) -> None:
    recipe = tmp_path / "own.toml"
    recipe.write_text('[data]\ntask = "sort:5"')
    assert load_config(recipe, values={"data.path": "a.jsonl"}).data.task is None
    assert load_config(recipe, values={"data.path": None}).data.task == "sort:5"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rollout": {"max_response_lenght": 9}}, "did you mean"),
        ({"steps": "many"}, "steps = 'many'"),
        ({"steps": lambda: 3}, "steps = <function"),
        ({"model": {"size": 3}}, "model = "),
        ({"data": 3}, "data is a section"),
        ({"schedule.sync_every": 4}, "schedule.max_staleness = 0"),
    ],
)
def test_wrong_value_raises_config_error(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(values=values)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("rollout.learning_rate", "train.learning_rate"),
        ("learning_rate", "train.learning_rate"),
        ("lr", "train.learning_rate"),
        ("optimizer.lr", "train.learning_rate"),
        ("rollout.group_size", "group_size"),
        ("train.steps", "steps"),
        ("schedule.max_queue_size", "queue.max_queue_size"),
        ("schedule.max_stalenes", "schedule.max_staleness"),
        ("stepps", "steps"),
        ("max_tokens", "rollout.max_response_length"),
        ("max_completion_length", "rollout.max_response_length"),
        ("rollout.max_tokens", "rollout.max_response_length"),
        ("max_steps", "steps"),
        ("num_train_epochs", "steps"),
        ("batch_size", "groups_per_step"),
        ("per_device_train_batch_size", "groups_per_step"),
        ("num_generations", "group_size"),
        ("rollout.num_samples", "group_size"),
        ("n", "group_size"),
        ("beta", "algorithm.kl_coef"),
        ("kl_loss_coef", "algorithm.kl_coef"),
        ("algorithm.beta", "algorithm.kl_coef"),
        ("epsilon", "algorithm.clip_low"),
        ("clip_ratio", "algorithm.clip_low"),
        ("epsilon_high", "algorithm.clip_high"),
        ("num_iterations", "algorithm.epochs"),
        ("loss_type", "algorithm.loss"),
        ("adv_estimator", "algorithm.name"),
        ("output_dir", "run_dir"),
        ("model_name_or_path", "model"),
        ("model_path", "model"),
        ("dataset", "data.path"),
        ("reward_funcs", "reward.function"),
        ("reward_model", "reward.model"),
        ("max_grad_norm", "train.max_grad_norm"),
        ("grad_clip", "train.max_grad_norm"),
        ("bf16", "train.dtype"),
        ("gradient_accumulation_steps", "train.micro_batch_tokens"),
        ("lora_r", "train.lora.rank"),
        ("lora.rank", "train.lora.rank"),
        ("tensor_parallel_size", "train.tensor_parallel"),
        ("gpu_memory_utilization", "rollout.kv_memory_fraction"),
        ("max_num_seqs", "rollout.slots"),
        ("use_vllm", "rollout.engine"),
        ("stop_sequences", "rollout.stop"),
        ("system_prompt", "data.system"),
        ("save_steps", "save_every"),
        ("save_total_limit", "keep_checkpoints"),
        ("staleness", "schedule.max_staleness"),
        ("num_gpus", "placement.train_ranks"),
        ("num_workers", "placement.rollout_workers"),
    ],
)
def test_unknown_setting_is_explained_with_full_name(name: str, meant: str) -> None:
    with pytest.raises(ConfigError) as rejected:
        load_config(None, [f"{name}=1"])
    assert f"unknown setting {name!r}; did you mean {meant!r}" in str(rejected.value)


def test_list_of_settings_names_those_without_default() -> None:
    defaults = {name: default for name, default, _ in describe_settings()}
    assert defaults["reward.judge.model"] == "required"
    assert not any("Undefined" in default for default in defaults.values())


def test_every_foreign_name_leads_to_setting() -> None:
    known = {name for name, _, _ in describe_settings()}
    assert set(FOREIGN_NAMES.values()) <= known


@pytest.mark.parametrize("name", ["hybrid", "hybrid.toml", "recipes/hybrid.toml"])
def test_recipe_is_found_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(name).data.task == "reverse:5"


def test_file_is_preferred_to_built_in_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hybrid.toml").write_text("steps = 77")
    assert load_config("hybrid.toml").steps == 77


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hybird", "did you mean hybrid? Built-in recipes: "),
        ("zzz", "recipe zzz does not exist; built-in recipes: "),
        ("steps=3", "name a recipe first. `paceline recipes` lists"),
        (".", "is a directory"),
    ],
)
def test_unknown_recipe_is_explained(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("- 1", "is a list"),
        ("a: [", "not valid YAML"),
        ("a: &a [*a]", "not valid YAML: Circular reference"),
    ],
)
def test_unusable_yaml_is_explained(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "a.yaml")


@pytest.mark.parametrize("name", ["a.toml", "a.yaml"])
def test_recipe_may_begin_with_byte_order_mark(name: str, tmp_path: Path) -> None:
    text = "steps = 3\n" if name.endswith("toml") else "steps: 3\n"
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert load_config(tmp_path / name).steps == 3


def test_setting_is_added_to_empty_section_of_yaml(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("steps: 3\ntrain:\n")
    assert load_config(tmp_path / "a.yaml", ["train.learning_rate=0.5"]).train.learning_rate == 0.5


def test_recipe_that_is_no_path_is_explained() -> None:
    with pytest.raises(ConfigError, match="the recipe is dict; expected the name or path"):
        load_config({"steps": 3})  # type: ignore[arg-type]


def test_every_recipe_has_description() -> None:
    assert all(describe_recipe(path) for path in built_in_recipes().values())


def test_fsdp2_is_fsdp() -> None:
    assert load_config(None, ["train.backend=fsdp2"]).train.backend == "fsdp"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("learning_rate", "train.learning_rate"),
        ("lr", "train.learning_rate"),
        ("beta", "algorithm.kl_coef"),
        ("schedule", "schedule.on_sync"),
    ],
)
def test_settings_command_finds_name_without_section(words: str, expected: str) -> None:
    assert expected in CliRunner().invoke(app, ["settings", words]).output


@pytest.mark.parametrize(
    ("words", "hint"), [("foo", "`paceline settings` lists"), ("leraning_rate", "train.learning")]
)
def test_settings_command_fails_with_hint_when_nothing_matches(words: str, hint: str) -> None:
    result = CliRunner().invoke(app, ["settings", words])
    assert result.exit_code == 2 and hint in result.output


def test_recipes_command_lists_every_recipe() -> None:
    lines = CliRunner().invoke(app, ["recipes"]).output.splitlines()
    assert [line.split()[0] for line in lines] == list(built_in_recipes())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["placement.min_gpus=64"], "remove trainer.n_gpus_per_node"),
        (["trainer.n_gpus_per_node=64"], "placement.min_gpus = 64, but this machine has"),
        (["data.path=nowhere.jsonl", "reward.function=exact"], "nowhere.jsonl"),
        (["reward.function=nowhere:score"], "nowhere"),
        (["rollout.environment=nowhere:Class"], "nowhere"),
    ],
)
def test_plan_rejects_what_train_rejects(
    settings: list[str], message: str, tmp_path: Path, model: str
) -> None:
    given = ["hybrid", f"model={model}", f"run_dir={tmp_path}", *settings]
    for command in ("plan", "train"):
        result = CliRunner().invoke(app, [command, *given])
        assert result.exit_code > 1 and message in result.output, result.output


@pytest.mark.skipif(find_spec("megatron") is not None, reason="megatron-core is installed")
def test_plan_rejects_megatron_when_package_is_missing(model: str) -> None:
    result = CliRunner().invoke(app, ["plan", "megatron_async", f"model={model}"])
    assert result.exit_code == 2 and "paceline[megatron]" in result.output


def test_differences_omits_time_and_memory_settings() -> None:
    before = load_config(None, ["data.task=sort:5"]).model_dump(mode="json")
    patient = load_config(
        None,
        [
            "data.task=sort:5",
            "rollout.generation_timeout=900",
            "reward.timeout_s=60",
            "train.micro_batch_tokens=512",
        ],
    )
    assert differences(before, patient.model_dump(mode="json")) == []


def test_differences_lists_settings_that_change_learning() -> None:
    before = load_config(None, ["data.task=sort:5"]).model_dump(mode="json")
    other = load_config(None, ["data.task=copy:5", "rollout.slots=8"]).model_dump(mode="json")
    assert differences(before, other) == ["data.task: was 'sort:5', is now 'copy:5'"]


def test_slots_do_not_exceed_trajectories_in_flight() -> None:
    few = ["groups_per_step=2", "group_size=4", "rollout.slots=256"]
    assert load_config(None, few).slots == 8
    assert load_config(None, [*few, "schedule.max_staleness=2"]).slots == 24
    assert load_config(None, [*few, "algorithm.name=remax"]).slots == 10
    assert load_config(None, [*few, "rollout.slots=3"]).slots == 3


def test_run_directory_may_be_path_and_in_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert load_config(values={"run_dir": Path("~/runs/a")}).run_dir == "/home/me/runs/a"
    assert load_config(overrides=["run_dir=~/runs/a"]).run_dir == "/home/me/runs/a"


def test_run_directory_with_null_character_is_rejected() -> None:
    expected = r"\n  run_dir = 'runs/a\\x00b': a path cannot contain a null character"
    with pytest.raises(ConfigError, match=expected):
        load_config(values={"run_dir": "runs/a\0b"})
