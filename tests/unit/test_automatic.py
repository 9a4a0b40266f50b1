"""Automatic settings: what is chosen for devices, model and load, without any of the devices."""

from collections.abc import Sequence

import pytest
from transformers import CTRLConfig, LlamaConfig, PretrainedConfig
from typer.testing import CliRunner

from paceline.cli import app
from paceline.config import RunConfig, differences, load_config
from paceline.errors import ConfigError
from paceline.model.known_shapes import known_shape
from paceline.settings import open_settings
from paceline.types import Role
from paceline.workers.automatic import Choice, changed_choices, choose, keep_recorded
from paceline.workers.cluster import Node, parse_nodes
from paceline.workers.layout import plan_on
from paceline.workers.phase_memory import Models

GB = 1 << 30
H200 = parse_nodes("1:139GB")
LAPTOP = [Node("local", 2, memory=24 * GB, cores=(0, 1))]
SMOL = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    tie_word_embeddings=True,
)
TINY = LlamaConfig(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
)
GSM8K = ["groups_per_step=32", "data.max_prompt_length=400", "rollout.max_response_length=256"]
LONG = ["groups_per_step=32", "data.max_prompt_length=1024", "rollout.max_response_length=3072"]
ASYNC = ["schedule.max_staleness=2", "schedule.on_sync=swap"]
SHARDED = ["train.backend=fsdp", "train.offload=true", "rollout.engine=vllm"]
SHARDED.append("rollout.tensor_parallel=8")
SEPARATE = ["placement.actor=train", "placement.rollout=rollout"]


def chosen(
    model: PretrainedConfig | str, nodes: Sequence[Node] | str, *settings: str
) -> tuple[RunConfig, dict[str, Choice]]:
    config = load_config(None, settings)
    shape = known_shape(model) if isinstance(model, str) else model
    nodes = parse_nodes(nodes) if isinstance(nodes, str) else nodes
    found, choices = choose(config, Models.of(config, shape), nodes)
    return found, {choice.name: choice for choice in choices}


@pytest.mark.parametrize(
    ("capability", "dtype"), [(0, "bfloat16"), (7, "float32"), (8, "bfloat16"), (9, "bfloat16")]
)
def test_dtype_is_bfloat16_when_gpu_supports_it(capability: int, dtype: str) -> None:
    node = Node("a", 8, 2, gpu_memory=80 * GB, capability=capability)
    assert chosen(SMOL, [node])[0].train.dtype == dtype
    assert chosen(SMOL, LAPTOP)[0].train.dtype == "float32"


@pytest.mark.parametrize(
    ("model", "nodes", "settings", "overlap"),
    [
        ("0.5b", "1:139GB", ASYNC, True),
        (SMOL, "1:139GB", ASYNC, True),
        ("0.5b", "1:139GB", [*ASYNC, "placement.overlap=false"], False),
        ("0.5b", "1:139GB", [], False),
        ("0.5b", "1:139GB", ["schedule.max_staleness=1"], False),
        ("0.5b", "1:139GB", [*ASYNC, "rollout.engine=vllm"], False),
        ("0.5b", "1:139GB", [*ASYNC, "train.lora.rank=8"], False),
        ("0.5b", "1:139GB", [*ASYNC, "cluster=ray"], False),
        ("0.5b", "2:80GB", [*ASYNC, *SEPARATE], False),
    ],
)
def test_one_gpu_generates_during_training_when_it_can(
    model: PretrainedConfig | str, nodes: str, settings: list[str], overlap: bool
) -> None:
    assert chosen(model, nodes, *settings)[0].placement.overlap == overlap
    assert not chosen(model, LAPTOP, *ASYNC)[0].placement.overlap


@pytest.mark.parametrize(
    ("model", "settings", "slots"),
    [
        (SMOL, ["groups_per_step=64", "group_size=16"], 1024),
        (SMOL, ["groups_per_step=64", "group_size=16", *ASYNC], 1024),
        (SMOL, ["groups_per_step=64", "group_size=8"], 512),
        ("0.5b", ["groups_per_step=32"], 256),
        ("0.5b", ["groups_per_step=32", *ASYNC], 768),
        ("0.5b", ["groups_per_step=32", "algorithm.name=remax"], 288),
        ("0.5b", ["groups_per_step=256", "rollout.engine=vllm"], 512),
    ],
)
def test_slots_on_gpu_hold_completions_in_flight(
    model: PretrainedConfig | str, settings: list[str], slots: int
) -> None:
    assert chosen(model, H200, *settings)[0].slots == slots


def test_slots_on_cpu_hold_completions_of_one_step() -> None:
    assert chosen(TINY, LAPTOP)[0].rollout.slots == 128
    assert chosen(TINY, LAPTOP, *SEPARATE, *ASYNC)[0].rollout.slots == 128
    assert chosen(TINY, LAPTOP, "groups_per_step=64")[0].rollout.slots == 256
    assert chosen(SMOL, LAPTOP, "groups_per_step=64")[0].rollout.slots == 64, "larger model"


def test_slots_are_divided_between_engines() -> None:
    config, choices = chosen("0.5b", "8:80GB", *GSM8K, "train.backend=fsdp")
    assert config.rollout.slots == 40, "a quarter more than 256 / 8"
    assert choices["rollout.slots"].why == "32 x 8 completions per step, 8 engines"


def test_slots_are_fewer_when_kv_cache_is_small() -> None:
    config, choices = chosen("0.5b", "1:16GB", *GSM8K)
    assert 100 < config.rollout.slots < 256
    assert choices["rollout.slots"].why.endswith("GB for the KV cache")
    small = [Node("local", 2, memory=12 * GB)]
    assert chosen("0.5b", small, *LONG)[0].rollout.slots < 64


@pytest.mark.parametrize(
    ("model", "devices", "settings", "tokens", "recomputes"),
    [
        (SMOL, "1:139GB", GSM8K, 32768, False),
        ("0.5b", "1:139GB", GSM8K, 32768, False),
        ("0.5b", "1:24GB", GSM8K, 8192, False),
        ("0.5b", "1:16GB", GSM8K, 2048, False),
        ("1.5b", "1:80GB", LONG, 8192, False),
        ("7b", "8:80GB", ["train.backend=fsdp", *LONG], 4096, False),
        ("70b", "4x8:80GB", [*SHARDED, *LONG], 4096, True),
    ],
)
def test_micro_batches_and_recomputation_fit_memory(
    model: PretrainedConfig | str,
    devices: str,
    settings: list[str],
    tokens: int,
    recomputes: bool,
) -> None:
    train = chosen(model, devices, *settings)[0].train
    assert (train.micro_batch_tokens, train.gradient_checkpointing) == (tokens, recomputes)


def test_recomputation_is_chosen_only_when_model_supports_it() -> None:
    few = ["placement.rollout=engines", *GSM8K]
    assert chosen(LlamaConfig(), "2:100GB", *few)[0].train.gradient_checkpointing
    other = CTRLConfig(n_embd=4096, dff=11008, n_layer=32, n_head=32)
    assert not chosen(other, "2:100GB", *few)[0].train.gradient_checkpointing


@pytest.mark.parametrize(
    ("model", "devices", "settings"),
    [
        ("0.5b", "1:16GB", GSM8K),
        ("1.5b", "1:80GB", [*LONG, *ASYNC, "placement.overlap=true"]),
        ("7b", "8:80GB", ["train.backend=fsdp", *LONG, *ASYNC, *SEPARATE]),
        ("7b", "8:80GB", ["train.backend=fsdp", *LONG, "algorithm.name=ppo", "train.offload=true"]),
    ],
)
def test_chosen_settings_need_no_memory_warning(
    model: str, devices: str, settings: list[str]
) -> None:
    layout = plan_on(load_config(None, settings), known_shape(model), parse_nodes(devices))
    assert layout.scarce == [] and layout.choices


def test_micro_batch_has_no_more_tokens_than_step() -> None:
    few = ["groups_per_step=2", "group_size=4", "data.max_prompt_length=24"]
    few.append("rollout.max_response_length=8")
    assert chosen(TINY, LAPTOP, *few)[0].train.micro_batch_tokens == 512
    assert chosen(TINY, H200, *few)[0].train.micro_batch_tokens == 2048


def test_unknown_memory_keeps_cautious_values() -> None:
    config, choices = chosen("0.5b", [Node("a", 8, 1)], *GSM8K)
    assert config.train.micro_batch_tokens == 4096 and config.rollout.kv_memory_fraction == 0.5
    assert config.train.dtype == "bfloat16" and config.rollout.slots == 256
    assert "rollout.kv_memory_fraction" not in choices


def test_set_value_wins() -> None:
    values = {
        "train.dtype": "float32",
        "train.micro_batch_tokens": 1000,
        "train.gradient_checkpointing": True,
        "rollout.slots": 7,
        "rollout.kv_memory_fraction": 0.3,
        "placement.threads": 3,
        "reward.workers": 2,
    }
    config = load_config(None, values={**values, "reward.function": "some.py:score"})
    assert choose(config, Models.of(config, SMOL), H200) == (config, [])


def test_auto_replaces_value_of_recipe() -> None:
    settings = ["rollout.slots=7", "rollout.slots=auto", "train.dtype=auto"]
    assert {"rollout.slots", "train.dtype"} <= set(open_settings(load_config(None, settings)))
    with pytest.raises(ConfigError, match=r"group_size = 'auto'"):
        load_config(None, ["group_size=auto"])


def test_dumped_settings_stay_automatic() -> None:
    config = load_config(None, ["rollout.slots=7"])
    dumped = config.model_dump(mode="json")
    assert dumped["rollout"]["slots"] == 7 and dumped["train"]["dtype"] == "auto"
    assert set(open_settings(RunConfig.model_validate(dumped))) == set(open_settings(config))


def test_settings_command_shows_auto() -> None:
    shown = CliRunner().invoke(app, ["settings", "rollout.slots"]).output
    assert shown.split()[:2] == ["rollout.slots", "auto"]


def test_reward_function_gets_process_for_every_four_cores() -> None:
    big = [Node("a", 64, memory=256 * GB)]
    function = "reward.function=some.py:score"
    assert chosen(TINY, [Node("a", 16)], function)[0].reward.workers == 4
    assert chosen(TINY, big, function)[0].reward.workers == 8
    assert chosen(TINY, LAPTOP, function)[0].reward.workers == 1
    assert "reward.workers" not in chosen(TINY, big, "reward.function=exact")[1]


def test_threads_share_cores_between_processes() -> None:
    config, choices = chosen(TINY, [Node("a", 8)], *SEPARATE)
    assert config.placement.threads == 4
    assert str(choices["placement.threads"]) == "placement.threads=4 (8 cores, 2 processes)"


def test_engine_alone_needs_no_training_settings() -> None:
    config = load_config(None, GSM8K)
    found, choices = choose(config, Models.of(config, SMOL), H200, [Role.ROLLOUT])
    assert found.rollout.slots == 256 and found.rollout.kv_memory_fraction > 0.8
    assert not [choice for choice in choices if "micro_batch" in choice.name]


def test_resumed_run_keeps_dtype_and_names_other_changes() -> None:
    first, _ = chosen(SMOL, LAPTOP, *GSM8K)
    recorded = first.model_dump(mode="json")
    config = keep_recorded(load_config(None, GSM8K), recorded)
    now, choices = choose(config, Models.of(config, SMOL), H200)
    assert now.train.dtype == "float32" and differences(recorded, now.model_dump(mode="json")) == []
    lines = changed_choices(choices, recorded)
    assert "rollout.slots was 64 before the run was resumed, and is 256 on these devices" in lines
    assert changed_choices(choices, now.model_dump(mode="json")) == []


def test_plan_command_says_what_was_chosen() -> None:
    command = ["plan", "gsm8k", "--devices", "1:80GB", "--shape", "0.5b"]
    found = CliRunner(env={"COLUMNS": "140"}).invoke(app, command)
    assert found.exit_code == 0, found.output
    for words in ("automatic settings", "bfloat16", "32 x 8 completions per step"):
        assert words in found.output
