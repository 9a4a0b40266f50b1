"""Translation of verl's settings, from files, scripts and overrides, to Paceline's."""

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.config import RunConfig, load_config
from paceline.errors import ConfigError
from paceline.translate.hydra import read_overrides, read_script
from paceline.translate.source import PROGRAM
from paceline.translate.toml import recipe_text
from paceline.translate.verl import translate

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
CORRECTION, THRESHOLD = "algorithm.rollout_correction.", "rollout_is_threshold"
OVERLONG = {"enable": True, "len": 64}
# All settings that the guides to verl's asynchronous training name.
GUIDE = {
    "data.train_batch_size": 4,
    "data.max_prompt_length": 32,
    "data.max_response_length": 8,
    "trainer.total_training_steps": 2,
    "trainer.n_gpus_per_node": 4,
    "rollout.n_gpus_per_node": 2,
    "async_training.staleness_threshold": 3,
    "async_training.max_queue_size": 100,
    "async_training.generation_timeout": 30.0,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
}
GUIDE_YAML = """
data: {train_batch_size: 4, max_prompt_length: 32, max_response_length: 8}
trainer: {total_training_steps: 2, n_gpus_per_node: 4}
rollout: {n_gpus_per_node: 2}
async_training: {staleness_threshold: 3, max_queue_size: 100, generation_timeout: 30.0}
actor_rollout_ref: {model: {enable_gradient_checkpointing: True}}
"""
SCRIPT = r"""
set -x
export VLLM_USE_V1=1
max_prompt_length=$((1024 * 2))   # tokens
len=$(((max_prompt_length + 1024) * 2))
HOME_DIR=${HOME_DIR:-"${DATA_HOME}/gsm8k"}
files="['$HOME_DIR/train.parquet', 'b.parquet']"
ROLLOUT=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=5)
python3 -m verl.trainer.main_ppo --config-path=config \
    algorithm.adv_estimator=grpo \
    data.train_files="$files" \
    data.max_prompt_length=${max_prompt_length} \
    ++actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$len \
    actor_rollout_ref.actor.optim.lr=1e-5 \
    trainer.logger='["console","wandb"]' \
    trainer.n_gpus_per_node=${N_GPUS:-8} "${ROLLOUT[@]}" $@
"""


def settings(values: dict[str, Any], **base: Any) -> dict[str, Any]:
    translation = translate(values, base)
    assert not translation.missing
    return translation.settings


def check_guide(config: RunConfig) -> None:
    assert (config.steps, config.groups_per_step) == (2, 4)
    assert (config.data.max_prompt_length, config.rollout.max_response_length) == (32, 8)
    assert (config.schedule.max_staleness, config.queue.max_queue_size) == (3, 100)
    assert config.rollout.generation_timeout == 30 and config.train.gradient_checkpointing
    placement = config.placement
    assert (placement.train_ranks, placement.rollout_workers, placement.min_gpus) == (4, 2, 6)
    assert placement.actor != placement.rollout and config.train.backend == "fsdp"


def test_settings_of_guide_are_accepted_as_yaml_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "guide.yaml"
    recipe.write_text(GUIDE_YAML)
    config = load_config(recipe, ["data.task=reverse:5"])
    check_guide(config)
    assert config.data.task == "reverse:5" and config.run_dir == "runs/guide"


def test_settings_of_guide_are_accepted_as_overrides_of_recipe() -> None:
    config = load_config("hybrid", [f"{name}={value}" for name, value in GUIDE.items()])
    check_guide(config)
    assert config.train.learning_rate == 2e-4  # the recipe's


def test_settings_of_guide_are_accepted_as_values_of_program() -> None:
    check_guide(load_config("hybrid", values=GUIDE))


def test_configuration_of_verl_keeps_optimizer_of_verl() -> None:
    given = ["algorithm.adv_estimator=grpo", f"{ROLLOUT}n=4", "data.task=reverse:5"]
    config = load_config(None, given)
    assert (config.train.betas, config.train.weight_decay) == ((0.9, 0.999), 0.01)
    assert config.train.staleness_kl_target == 0


def test_own_setting_replaces_translated_setting() -> None:
    config = load_config("hybrid", ["steps=7", "trainer.total_training_steps=2"])
    assert config.steps == 7


def test_yaml_recipe_has_own_settings_without_translation(tmp_path: Path) -> None:
    recipe = tmp_path / "own.yaml"
    recipe.write_text("steps: 3\ntrain: {learning_rate: 1e-5}\ndata: {task: 'sort:5'}\n")
    config = load_config(recipe)
    assert (config.steps, config.train.learning_rate, config.data.task) == (3, 1e-5, "sort:5")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"trainer.save_freq": -1}, {"save_every": 0}),
        ({"trainer.default_local_dir": "ckpt/a"}, {"run_dir": "ckpt/a"}),
        ({"trainer.project_name": "p", "trainer.experiment_name": "e"}, {"run_dir": "runs/p/e"}),
        ({"actor_rollout_ref.model.path": "Qwen/Qwen3-8B"}, {"model": "Qwen/Qwen3-8B"}),
        ({"actor_rollout_ref.model.lora_rank": 0}, {}),
        (
            {"actor_rollout_ref.model.lora_rank": 8, "actor_rollout_ref.model.lora_alpha": 4},
            {"train.lora.rank": 8, "train.lora.alpha": 4},
        ),
        (
            {"data.train_batch_size": 64, f"{ACTOR}ppo_mini_batch_size": 16},
            {"groups_per_step": 64, "algorithm.mini_batches": 4},
        ),
        ({f"{ACTOR}ppo_epochs": 2}, {"algorithm.epochs": 2}),
        ({f"{ACTOR}optim.lr": "1e-5"}, {"train.learning_rate": 1e-5}),
        (
            {f"{ACTOR}optim.lr_warmup_steps_ratio": 0.1, "trainer.total_training_steps": 50},
            {"steps": 50, "train.warmup_steps": 5},
        ),
        (
            {f"{ACTOR}clip_ratio": 0.1, f"{ACTOR}clip_ratio_high": 0.28},
            {"algorithm.clip_low": 0.1, "algorithm.clip_high": 0.28},
        ),
        ({f"{ACTOR}loss_agg_mode": "token-mean"}, {"algorithm.aggregation": "token"}),
        (
            {f"{ACTOR}use_kl_loss": True, f"{ACTOR}kl_loss_coef": 0.01},
            {
                "algorithm.kl_coef": 0.01,
                "algorithm.kl_placement": "loss",
                "algorithm.kl_estimator": "k3",
            },
        ),
        (
            {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive"},
            {
                "algorithm.kl_coef": 0.001,
                "algorithm.kl_placement": "reward",
                "algorithm.kl_estimator": "k1",
                "algorithm.kl_target": 0.1,
            },
        ),
        (
            {f"{ACTOR}use_kl_loss": True, f"{ACTOR}kl_loss_type": "low_var_kl+"},
            {
                "algorithm.kl_coef": 0.001,
                "algorithm.kl_placement": "loss",
                "algorithm.kl_estimator": "k2",
            },
        ),
        ({f"{ACTOR}kl_loss_coef": 0.01}, {}),
        ({f"{ACTOR}strategy": "fsdp2"}, {"train.backend": "fsdp"}),
        (
            {f"{ACTOR}strategy": "megatron", f"{ACTOR}megatron.tensor_model_parallel_size": 2},
            {"train.backend": "megatron", "train.tensor_parallel": 2},
        ),
        (
            {f"{ACTOR}strategy": "fsdp", "trainer.n_gpus_per_node": 1},
            {"train.backend": "single", "placement.train_ranks": 1, "placement.min_gpus": 1},
        ),
        ({"trainer.n_gpus_per_node": 0, "trainer.nnodes": 1}, {}),
        (
            {f"{ACTOR}fsdp_config.param_offload": True, f"{ACTOR}fsdp_config.fsdp_size": -1},
            {"train.offload": True},
        ),
        ({f"{ROLLOUT}n": 5, f"{ROLLOUT}top_k": -1}, {"group_size": 5, "rollout.top_k": 0}),
        ({"algorithm.adv_estimator": "reinforce_plus_plus"}, {"algorithm.name": "reinforce++"}),
        ({"algorithm.norm_adv_by_std_in_grpo": False}, {"algorithm.normalize": "none"}),
        (
            {"algorithm.rollout_correction.rollout_is": "token"},
            {
                "algorithm.correction": "truncate",
                "algorithm.correction_level": "token",
                "algorithm.correction_range": [0, 2.0],
            },
        ),
        (
            {"reward_model.overlong_buffer.enable": True, "reward_model.overlong_buffer.len": 64},
            {"algorithm.overlong": "penalty", "algorithm.overlong_buffer": 64},
        ),
        (
            {f"reward.reward_kwargs.overlong_buffer_cfg.{n}": v for n, v in OVERLONG.items()},
            {"algorithm.overlong": "penalty", "algorithm.overlong_buffer": 64},
        ),
        (
            {"custom_reward_function.path": "r.py", "custom_reward_function.name": "f"},
            {"reward.function": "r.py:f"},
        ),
        ({"reward_model.enable": True, "reward_model.model.path": "rm"}, {"reward.model": "rm"}),
        (
            {"data.train_files": "d/gsm8k/train.parquet"},
            {
                "data.path": "d/gsm8k/train.parquet",
                "data.answer_key": "reward_model.ground_truth",
                "reward.function": "last_number",
            },
        ),
        (
            {"actor_rollout_ref.hybrid_engine": False},
            {
                "placement.actor": "train",
                "placement.rollout": "rollout",
                "schedule.max_staleness": 1,
                "schedule.on_sync": "drain",
            },
        ),
        (
            {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 4},
            {
                "train.backend": "fsdp",
                "placement.train_ranks": 8,
                "placement.min_gpus": 8,
                "cluster": "ray",
                "ray.address": "auto",
            },
        ),
        ({f"{ROLLOUT}response_length": "${data.max_response_length}"}, {}),
    ],
)
def test_setting_of_verl_is_translated(values: dict[str, Any], expected: dict[str, Any]) -> None:
    assert settings(values) == expected


@pytest.mark.parametrize(
    ("threshold", "sync_every", "staleness"),
    [(0, 1, 0), (0.1, 1, 1), (3, 1, 3), (0, 4, 3), (0.5, 4, 5)],
)
def test_staleness_threshold_becomes_age_in_steps(
    threshold: float, sync_every: int, staleness: int
) -> None:
    found = settings(
        {
            "async_training.staleness_threshold": threshold,
            "async_training.trigger_parameter_sync_step": sync_every,
        }
    )
    assert found["schedule.max_staleness"] == staleness
    assert found["schedule.on_sync"] == "interrupt"


def test_fully_async_step_trains_required_mini_batches() -> None:
    found = settings(
        {
            "data.train_batch_size": 0,
            f"{ACTOR}ppo_mini_batch_size": 32,
            "async_training.require_batches": 4,
            "rollout.total_rollout_steps": 1280,
        }
    )
    assert (found["groups_per_step"], found["algorithm.mini_batches"], found["steps"]) == (
        128,
        4,
        10,
    )


@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_gpus_of_rollout_are_divided_by_parallel_size(split: str) -> None:
    values = {f"{ROLLOUT}name": "vllm", f"{ROLLOUT}{split}_model_parallel_size": 2}
    found = settings(values | {"trainer.n_gpus_per_node": 8, "rollout.n_gpus_per_node": 8})
    assert (found[f"rollout.{split}_parallel"], found["placement.rollout_workers"]) == (2, 4)


def test_split_program_leaves_division_of_gpus_to_plan() -> None:
    found = settings({"program": "main_ppo_split", "trainer.n_gpus_per_node": 8})
    assert found["placement.critic"] == "critic_pool" and "placement.train_ranks" not in found


def test_defaults_of_verl_are_added_to_complete_configuration_only() -> None:
    values = {"algorithm.adv_estimator": "grpo", "data.train_batch_size": 8}
    assert translate(values, {}).settings == {"algorithm.name": "grpo", "groups_per_step": 8}
    complete = translate(values, {}, complete=True).settings
    assert complete["algorithm.aggregation"] == "token" and complete["group_size"] == 1
    assert load_config("hybrid", ["algorithm.adv_estimator=rloo"]).groups_per_step == 16


def test_setting_without_effect_on_algorithm_is_dropped() -> None:
    values = {"algorithm.adv_estimator": "opo", f"{ACTOR}clip_ratio": 0.1}
    assert settings(values) == {"algorithm.name": "opo"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("critic.optim.lr=1e-5", "train.learning_rate"),
        (f"{ROLLOUT}multi_turn.enable=True", "rollout.environment"),
        ("trainer.total_trainig_steps=3", "did you mean 'trainer.total_training_steps'?"),
        ("actor_rollout_ref.rolout.n=4", "did you mean 'actor_rollout_ref.rollout.n'?"),
        ("algorithm.adv_estimator=grpo_passk", "expected one of gae, grpo"),
        (f"{ACTOR}policy_loss.loss_mode=kl_cov", "expected one of vanilla, gspo"),
        ("algorithm.adv_estimator=[gae, grpo]", "expected one of gae, grpo"),
        (f"{ACTOR}loss_agg_mode=[token-mean]", "expected one of token-mean"),
        (f"{ACTOR}optim.lr_scheduler_type=.nan", "train.lr_schedule is one of constant"),
        (f"{ACTOR}ppo_mini_batch_size=.inf", "expected a number"),
        (f"{ACTOR}ppo_mini_batch_size=0", "expected a positive number"),
        ("data.train_batch_size=true", "expected a number"),
        (f"{ROLLOUT}do_sample=False", "set rollout.temperature"),
        ("trainer.total_training_steps=many", "expected a number"),
    ],
)
def test_setting_without_counterpart_is_rejected(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match="paceline translate") as rejected:
        load_config("split", [override])
    assert override.partition("=")[0] in str(rejected.value) and message in str(rejected.value)


def test_wrong_text_of_threshold_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"two as 0\.5_5\.0"):
        load_config("hybrid", [f"{CORRECTION}rollout_is=token", f"{CORRECTION}{THRESHOLD}=a_b"])


@pytest.mark.parametrize("name", ["steps", "groups_per_step", "schedule.sync_every"])
def test_wrong_number_beside_settings_of_verl_is_explained(name: str) -> None:
    verl = [f"{ACTOR}optim.lr_warmup_steps_ratio=0.1", f"{ACTOR}ppo_mini_batch_size=8"]
    verl += ["async_training.staleness_threshold=1"]
    with pytest.raises(ConfigError, match=f"{name} = 'many': input should be a valid integer"):
        load_config("hybrid", [f"{name}=many", *verl])


@pytest.mark.parametrize("value", ["False", "null", "''"])
def test_setting_without_counterpart_is_accepted_when_off(value: str) -> None:
    load_config("hybrid", [f"{ROLLOUT}multi_turn.enable={value}"])


def test_empty_sections_and_defaults_of_yaml_are_ignored(tmp_path: Path) -> None:
    recipe = tmp_path / "verl.yaml"
    recipe.write_text(
        "defaults: [ppo_trainer, _self_]\nray_kwargs: {}\ncritic:\n"
        "trainer: {total_training_steps: 5, device: cuda, resume_from_path: null}\n"
        "algorithm: {_target_: verl.trainer.config.AlgoConfig}\n"
        "actor_rollout_ref: {rollout: {name: '???', response_length: '${data.x}'}}\n"
    )
    assert load_config(recipe).steps == 5


def test_typo_in_section_that_both_have_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"'reward\.functoin'; did you mean 'reward\.function'"):
        load_config("hybrid", ["reward.functoin=score.py:f"])
    with pytest.raises(ConfigError, match=r"unknown setting 'reward\.timeout'"):
        load_config("hybrid", ["reward.timeout=5"])
    load_config("hybrid", ["reward.reward_manager.source=register"])  # of verl


def test_ignored_setting_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    load_config("hybrid", ["trainer.test_freq=5"])
    assert "trainer.test_freq" in caplog.text


def test_overrides_are_read_as_hydra_does() -> None:
    assert read_overrides(
        ["a.b=1", "+a.c=[x,'y z']", "++a.d=True", "a.e=null", "a.f='1:2'", "a.g=x", "~a.g"]
    ) == {"a.b": 1, "a.c": ["x", "y z"], "a.d": True, "a.e": None, "a.f": "1:2"}
    assert read_overrides(["~a.b"], {"a.b.c": 1, "a.b": 2, "a.bc": 3}) == {"a.bc": 3}
    assert read_script("python3 -m x a.b=1 a.c=2 ~a.b") == {"a.c": 2}


@pytest.mark.parametrize("in_script", [False, True])
def test_removed_setting_is_not_translated(in_script: bool, tmp_path: Path) -> None:
    words = [f"{ROLLOUT}n=5", "data.train_batch_size=8", f"~{ROLLOUT}n"]
    if in_script:
        (tmp_path / "run.sh").write_text(f"python3 -m verl.trainer.main_ppo {words[2]}\n")
        words[2] = str(tmp_path / "run.sh")
    result = CliRunner().invoke(app, ["translate", *words])
    assert result.exit_code == 0, result.output
    assert "group_size" not in result.stdout and "groups_per_step = 8" in result.stdout


def test_script_is_read_with_variables_arithmetic_and_arrays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DATA_HOME", "/data")
    assert read_script(SCRIPT) == {
        f"{ROLLOUT}name": "vllm",
        f"{ROLLOUT}n": 5,
        "algorithm.adv_estimator": "grpo",
        "data.train_files": ["/data/gsm8k/train.parquet", "b.parquet"],
        "data.max_prompt_length": 2048,
        f"{ACTOR}ppo_max_token_len_per_gpu": 6144,
        f"{ACTOR}optim.lr": "1e-5",
        "trainer.logger": ["console", "wandb"],
        "trainer.n_gpus_per_node": 8,
        "program": "verl.trainer.main_ppo",
    }


def test_translate_command_writes_recipe_that_loads(tmp_path: Path) -> None:
    script, recipe = tmp_path / "run.sh", tmp_path / "out.toml"
    script.write_text(SCRIPT)
    more = ["critic.optim.lr=1e-5", "algorithm.adv_estimator=gae", "algorithm.lam=0.95"]
    result = CliRunner().invoke(app, ["translate", str(script), *more, "-o", str(recipe)])
    assert result.exit_code == 0, result.output
    assert "trainer.logger" in result.stderr and "critic.optim.lr" not in result.stderr
    config = load_config(recipe)
    assert (config.algorithm.name, config.algorithm.lam, config.group_size) == ("ppo", 0.95, 5)


def test_translate_command_lists_what_has_no_counterpart() -> None:
    words = ["python3", "-m", "verl.trainer.main_ppo", "algorithm.adv_estimator=gae"]
    result = CliRunner().invoke(app, ["translate", *words, "critic.optim.lr=1e-4", "data.foo=3"])
    assert result.exit_code == 0, result.output
    assert tomllib.loads(result.stdout)["algorithm"]["name"] == "ppo"
    for text in (result.stdout, result.stderr):
        assert "critic.optim.lr" in text and "1e-06 is also the critic's" in text
        assert "data.foo = 3: unknown" in text


def test_translate_command_accepts_override_whose_value_is_yaml_file() -> None:
    tools = f"{ROLLOUT}multi_turn.tool_config_path=config/tools.yaml"
    result = CliRunner().invoke(app, ["translate", "data.train_batch_size=64", tools])
    assert result.exit_code == 0, result.output
    assert tomllib.loads(result.stdout)["groups_per_step"] == 64


def test_translate_command_fails_when_file_cannot_be_written(tmp_path: Path) -> None:
    output = str(tmp_path / "no" / "out.toml")
    result = CliRunner().invoke(app, ["translate", "data.train_batch_size=64", "-o", output])
    assert result.exit_code == 2 and "cannot be written" in result.stderr


def test_translate_command_fails_when_script_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_bytes(b"\xeb\x00")
    result = CliRunner().invoke(app, ["translate", str(tmp_path / "run.sh")])
    assert result.exit_code == 2 and "cannot be read" in result.stderr


def test_translate_command_fails_when_nothing_is_given() -> None:
    result = CliRunner().invoke(app, ["translate", "nowhere"])
    assert result.exit_code == 2 and "'nowhere' has no settings of verl" in result.stderr
    result = CliRunner().invoke(app, ["translate", "nowhere.sh"])
    assert result.exit_code == 2 and "there is no file 'nowhere.sh'" in result.stderr


def test_validation_becomes_evaluation_during_training() -> None:
    settings = ["data.val_files=[a.parquet,b.parquet]", "trainer.test_freq=5"]
    kwargs = "actor_rollout_ref.rollout.val_kwargs"
    found = load_config("hybrid", [*settings, f"{kwargs}.n=4", f"{kwargs}.temperature=0.6"])
    assert found.evaluation.path == ("a.parquet", "b.parquet")
    assert (found.evaluation.every, found.evaluation.samples) == (5, 4)
    assert found.evaluation.temperature == 0.6
    assert not load_config("hybrid", ["data.val_files=a.parquet"]).evaluation.has_data


def test_script_may_have_empty_default() -> None:
    text = "python -m verl.trainer.main_ppo trainer.experiment_name=run${NO_SUFFIX:-}"
    assert read_script(text)["trainer.experiment_name"] == "run"


def test_script_may_assign_or_require_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LR", "1e-5")
    text = f"verl.trainer.main_ppo {ROLLOUT}n=${{N:=4}} {ACTOR}optim.lr=${{LR:?unset}}"
    found = translate(read_script(text), {}).settings
    assert (found["group_size"], found["train.learning_rate"]) == (4, 1e-5)


@pytest.mark.parametrize("line", [": ${M:=Qwen/Q}", ': "${M:=Qwen/Q}"', ": ${M=${ORG}/Q}"])
def test_script_keeps_default_that_it_assigns(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORG", "Qwen")
    text = f"{line}\nverl.trainer.main_ppo actor_rollout_ref.model.path=$M"
    assert read_script(text)["actor_rollout_ref.model.path"] == "Qwen/Q"


@pytest.mark.parametrize("value", ["${M:?set the model}", "${NONE:-${M:-a b}}", "${NONE:-Qwen Q}"])
def test_script_may_have_spaces_in_braces(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("M", "Qwen Q")
    text = f"MODEL={value}\nverl.trainer.main_ppo a.b=$MODEL actor_rollout_ref.model.path={value}"
    found = read_script(text)
    assert found["a.b"] == found["actor_rollout_ref.model.path"] == "Qwen Q"


def test_value_that_cannot_be_resolved_has_remark() -> None:
    values = read_overrides([f"{ROLLOUT}n=${{group.size}}", f"{ACTOR}shuffle=${{data.x}}"])
    notes = translate(values, {}, complete=True).notes
    assert notes == {f"{ROLLOUT}n": "refers to a value that is not given; the default applies"}


def test_script_may_have_shell_commands() -> None:
    script = """
    PROJECT="$(pwd)"
    NAME="run_$(date '+%Y-%m-%d')"
    ARGS=(actor_rollout_ref.rollout.n=4 data.train_batch_size=8)
    python3 -m verl.trainer.main_ppo data.train_files="$PROJECT/train.parquet" ${ARGS[@]} \\
        trainer.experiment_name=$NAME
    """
    found = translate(read_script(script), {})
    assert found.settings["data.path"] == f"{os.getcwd()}/train.parquet"
    assert (found.settings["group_size"], found.settings["groups_per_step"]) == (4, 8)
    assert "run_dir" not in found.settings
    note = "contains a shell command; the default applies"
    assert found.notes["trainer.experiment_name"] == note


def test_no_verifier_is_chosen_for_data_of_several_kinds() -> None:
    values = {"data.train_files": ["d/gsm8k/train.parquet", "d/math/train.parquet"]}
    found = translate(values, {})
    assert "reward.function" not in found.settings
    assert found.notes["data.train_files"].startswith("set reward.function")


def test_rollout_frequency_evaluates_when_that_of_trainer_is_off() -> None:
    given = ["data.val_files=a.parquet", "trainer.test_freq=-1", "rollout.test_freq=7"]
    assert load_config("hybrid", given).evaluation.every == 7


def test_recipe_has_remark_when_value_is_date() -> None:
    values = read_overrides(["trainer.comment=2026-11-18"])
    text = recipe_text(translate(values, {}), values, "a script")
    assert '#   trainer.comment = "2026-11-18": Paceline has no use for it' in text


def test_references_inside_of_path_are_resolved() -> None:
    values = {
        "trainer.project_name": "math",
        "trainer.experiment_name": "small",
        "trainer.default_local_dir": "ckpt/${trainer.project_name}/${trainer.experiment_name}",
    }
    translation = translate(values, {})
    assert translation.settings["run_dir"] == "ckpt/math/small"
    assert "trainer.default_local_dir" not in translation.notes


def test_options_of_hydra_are_ignored_with_remark() -> None:
    translation = translate({"--config-name": "ppo_megatron_trainer.yaml"}, {})
    assert not translation.missing
    assert "give it to `paceline translate`" in translation.notes["--config-name"]


def test_script_may_have_comments_between_lines_of_command() -> None:
    script = "main_ppo a.b=1 `# the first` \\\n  c.d=2\n"
    assert read_script(script) == {"a.b": 1, "c.d": 2, PROGRAM: "main_ppo"}


def test_script_may_have_commands_in_backquotes_before_comments() -> None:
    script = "NOW=`date +%s`  # of the start\nmain_ppo a.b=1 \\\n  c.d=`hostname`\n"
    assert read_script(script) == {"a.b": 1, "c.d": "`hostname`", PROGRAM: "main_ppo"}


def test_script_may_append_to_arrays_and_variables() -> None:
    script = "ARGS=(a.b=1)\nARGS+=(c.d=2)\nNAME=grpo\nNAME+=_small\nmain_ppo e.f=$NAME ${ARGS[@]}\n"
    assert read_script(script) == {"a.b": 1, "c.d": 2, "e.f": "grpo_small", PROGRAM: "main_ppo"}


def test_script_may_end_commands_with_semicolon() -> None:
    script = "if true; then N=3; fi\nARGS=(a.b=1);\nmain_ppo c.d=$N e.f=4; echo done\n"
    assert read_script(script) == {"a.b": 1, "c.d": 3, "e.f": 4, PROGRAM: "main_ppo"}
