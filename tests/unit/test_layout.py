"""Layouts of clusters that are not there: memory of each phase, and the nearest one that fits."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.config import RunConfig, load_config
from paceline.errors import ConfigError, ModelError
from paceline.model.known_shapes import SHAPES, known_shape
from paceline.training.memory import memory_estimate, parameter_count
from paceline.types import Role
from paceline.workers.cluster import Device, Node, PlannedWorker, parse_nodes
from paceline.workers.fit import DoesNotFit, check_fit
from paceline.workers.layout import plan_on
from paceline.workers.nearest import nearest_layout
from paceline.workers.phase_memory import Models, Phase, WorkerMemory
from paceline.workers.pools import plan_workers

GB = 1 << 30
BF16 = "train.dtype=bfloat16"
FSDP = ["train.backend=fsdp", BF16]
ALTERNATING = ["train.gradient_checkpointing=true", "train.offload=true", "rollout.engine=vllm"]
SEPARATE = ["placement.actor=train", "placement.rollout=rollout"]
VLLM = [*SEPARATE, BF16, "rollout.engine=vllm"]


@pytest.mark.parametrize(
    ("text", "nodes", "gpus", "memory"),
    [
        ("4x8:80GB", 4, 8, 80),
        ("8:24GB", 1, 8, 24),
        ("2x4:80gb", 2, 4, 80),
        ("1:141.5 GB", 1, 1, 141.5),
    ],
)
def test_devices_are_parsed(text: str, nodes: int, gpus: int, memory: float) -> None:
    found = parse_nodes(text)
    assert len(found) == nodes and {node.gpus for node in found} == {gpus}
    assert {node.gpu_memory for node in found} == {int(memory * GB)}


@pytest.mark.parametrize(
    "text", ["", "8", "4x8", "0x8:80GB", "8:80", "axb:80GB", "4x0:80GB", "8:0GB"]
)
def test_devices_are_rejected_when_malformed(text: str) -> None:
    with pytest.raises(ConfigError, match="for example 4x8:80GB"):
        parse_nodes(text)


def test_known_shapes_have_size_of_their_name() -> None:
    billions = [parameter_count(known_shape(name)) / 1e9 for name in SHAPES]
    assert billions == pytest.approx([0.49, 1.54, 3.09, 7.62, 14.77, 32.76, 70.55], abs=0.01)
    with pytest.raises(ModelError, match="expected one of"):
        known_shape("71b")


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_estimate_is_divided_by_ranks(backend: str) -> None:
    shape = known_shape("7b")
    one = load_config(None, [BF16]).train
    tensor = 2 if backend == "megatron" else 1
    many = load_config(None, [f"train.backend={backend}", f"train.tensor_parallel={tensor}", BF16])
    alone = memory_estimate(shape, one, gpu=False)
    sharded = memory_estimate(shape, many.train, 8, gpu=False)
    for part in ("parameters", "gradients"):
        assert sharded[part] == pytest.approx(alone[part] / (tensor if tensor > 1 else 8), rel=0.01)
    assert sharded["optimizer"] == pytest.approx(alone["optimizer"] / 8, rel=0.01)


def test_megatron_stage_holds_embedding_or_output_layer() -> None:
    shape = known_shape("70b")
    config = load_config(
        None, ["train.backend=megatron", "train.tensor_parallel=8", "train.pipeline_parallel=4"]
    )
    held = memory_estimate(shape, config.train, 32, gpu=True)["parameters"] // 4
    embedding = 128256 * 8192
    layers = parameter_count(shape) - 2 * embedding
    assert held == pytest.approx((layers / 4 + embedding) / 8, rel=0.001)


def phases(config: RunConfig, ranks: int, *roles: Role) -> dict[Phase, dict[str, float]]:
    plan = PlannedWorker("main", roles, ranks, devices=(Device("a", 0),) * max(1, ranks))
    models = Models(known_shape("1.5b"))
    found = WorkerMemory(plan, config, models, gpu=True, device_bytes=80 * GB).phases()
    return {
        phase: {name: need.at_most / GB for name, need in needs.items()}
        for phase, needs in found.items()
    }


def test_offload_leaves_only_working_role_on_device() -> None:
    config = load_config(None, [*FSDP, "algorithm.name=ppo", "train.offload=true"])
    found = phases(config, 4, Role.ACTOR, Role.CRITIC, Role.ROLLOUT)
    (working,) = {name.split()[0] for name in found[Phase.TRAIN]}
    assert working in (Role.ACTOR, Role.CRITIC), "neither both nor an engine"
    assert set(found[Phase.GENERATE]) == {"engine weights", "KV cache"}
    assert set(found[Phase.SYNC]) == {
        *("actor parameters", "actor optimizer", "engine weights", "largest tensor")
    }


def test_all_roles_stay_on_device_without_offload() -> None:
    config = load_config(None, [*FSDP, "algorithm.name=ppo"])
    found = phases(config, 4, Role.ACTOR, Role.CRITIC, Role.ROLLOUT)
    for phase in Phase:
        assert {"actor optimizer", "critic optimizer", "KV cache"} <= set(found[phase])
    trained = [name for name in found[Phase.TRAIN] if name.endswith("activations")]
    assert len(trained) == 1, "roles alternate, so one of them works"


def test_engine_that_shares_weights_adds_only_cache() -> None:
    found = phases(load_config(None, [BF16]), 0, Role.ACTOR, Role.ROLLOUT)
    assert "engine weights" not in found[Phase.GENERATE] and Phase.SYNC not in found
    weights = 1.54e9 / GB
    assert found[Phase.TRAIN]["actor parameters"] == pytest.approx(6 * weights, rel=0.01)


def test_cache_of_vllm_is_counted_in_blocks() -> None:
    lengths = ["data.max_prompt_length=100", "rollout.max_response_length=29"]
    cache = {
        engine: phases(
            load_config(None, [*SEPARATE, BF16, *lengths, f"rollout.engine={engine}"]),
            0,
            Role.ROLLOUT,
        )[Phase.GENERATE]["KV cache"]
        for engine in ("native", "vllm")
    }
    assert cache["vllm"] / cache["native"] == pytest.approx(256 / 129, rel=0.02)


def test_engine_rank_holds_its_part_of_weights() -> None:
    whole = phases(load_config(None, VLLM), 0, Role.ROLLOUT)[Phase.GENERATE]
    settings = [*VLLM, "rollout.tensor_parallel=2"]
    part = phases(load_config(None, settings), 2, Role.ROLLOUT)[Phase.GENERATE]
    assert part == {name: pytest.approx(size / 2) for name, size in whole.items()}


def test_engine_stage_holds_its_layers_and_embedding() -> None:
    settings = [*VLLM, "rollout.pipeline_parallel=2"]
    shape = known_shape("1.5b")
    embedding = shape.vocab_size * shape.hidden_size * 2 / GB
    whole = phases(load_config(None, VLLM), 0, Role.ROLLOUT)[Phase.GENERATE]
    part = phases(load_config(None, settings), 2, Role.ROLLOUT)[Phase.GENERATE]
    layers = whole["engine weights"] - embedding  # the first and the last stage have the embedding
    assert part["engine weights"] == pytest.approx(layers / 2 + embedding, rel=1e-3)
    assert part["KV cache"] == pytest.approx(whole["KV cache"] / 2)


@pytest.mark.parametrize(
    ("shape", "devices", "settings"),
    [
        ("0.5b", "1:24GB", ["train.gradient_checkpointing=true"]),
        ("1.5b", "8:80GB", FSDP),
        ("7b", "8:80GB", [*FSDP, "train.gradient_checkpointing=true"]),
        ("7b", "8:80GB", [*FSDP, *SEPARATE, "train.gradient_checkpointing=true"]),
        ("32b", "2x8:141GB", [*FSDP, "train.gradient_checkpointing=true", "train.offload=true"]),
        ("70b", "4x8:80GB", [*FSDP, *ALTERNATING, "rollout.tensor_parallel=8"]),
        (
            "70b",
            "4x8:80GB",
            [*FSDP, *ALTERNATING, "rollout.tensor_parallel=4", "rollout.pipeline_parallel=2"],
        ),
    ],
)
def test_layout_fits_as_asked(shape: str, devices: str, settings: list[str]) -> None:
    layout = plan_on(load_config(None, settings), known_shape(shape), parse_nodes(devices))
    assert layout.scarce == []


@pytest.mark.parametrize(
    ("shape", "devices", "settings", "expected"),
    [
        ("0.5b", "1:24GB", [], "train.gradient_checkpointing=true"),
        ("7b", "8:80GB", [BF16], "train.backend=fsdp"),
        ("7b", "8:80GB", [*FSDP, "placement.train_ranks=1"], "placement.train_ranks=8"),
        ("70b", "4x8:80GB", [*FSDP], "rollout.engine=vllm rollout.tensor_parallel="),
        ("70b", "4x8:80GB", [*SEPARATE, *FSDP, "placement.rollout_workers=24"], "rollout_workers="),
    ],
)
def test_nearest_layout_fits(shape: str, devices: str, settings: list[str], expected: str) -> None:
    config, nodes = load_config(None, settings), parse_nodes(devices)
    models = Models.of(config, known_shape(shape))
    found = nearest_layout(config, models, nodes)
    assert found is not None and expected in found
    changed = load_config(None, [*settings, *found.split()])
    assert check_fit(plan_workers(changed, nodes), nodes, changed, models) == []


def test_nearest_layout_is_none_when_devices_are_too_few() -> None:
    config = load_config(None, FSDP)
    with pytest.raises(DoesNotFit, match="no layout of these devices fits: train adapters"):
        plan_on(config, known_shape("70b"), parse_nodes("8:80GB"))
    assert nearest_layout(config, Models.of(config, known_shape("70b")), [Node("a", 2)]) is None


def test_rank_of_70b_on_32_gpus_holds_documented_memory() -> None:
    settings = [*FSDP, "train.gradient_checkpointing=true", "train.offload=true"]
    plan = PlannedWorker("main", (Role.ACTOR,), 32, devices=(Device("a", 0),) * 32)
    memory = WorkerMemory(plan, load_config(None, settings), Models(known_shape("70b")), gpu=True)
    needs = {name: need.at_most / GB for name, need in memory.phases()[Phase.TRAIN].items()}
    assert needs == {
        "actor parameters": pytest.approx(8.2, abs=0.05),
        "actor gradients": pytest.approx(8.2, abs=0.05),
        "actor optimizer": pytest.approx(16.4, abs=0.05),
        "actor gathered layers": pytest.approx(15.8, abs=0.05),
        "actor activations": pytest.approx(13.8, abs=0.05),
    }


def test_plan_warns_when_gpus_are_not_used() -> None:
    nodes, shape = parse_nodes("8:80GB"), known_shape("0.5b")
    (warning,) = plan_on(load_config(None), shape, nodes).warnings
    assert "7 of 8 GPUs are not used" in warning
    assert plan_on(load_config(None, FSDP), shape, nodes).warnings == []


def plan_command(*arguments: str) -> str:
    shown = CliRunner(env={"COLUMNS": "140"}).invoke(app, ["plan", *arguments])
    return f"{shown.exit_code} {shown.output}"


RECIPES = Path(__file__).parents[2] / "recipes"


def test_plan_command_draws_absent_cluster() -> None:
    settings = [BF16, "train.gradient_checkpointing=true"]
    found = plan_command(
        str(RECIPES / "split.toml"), *settings, "--devices", "2x8:80GB", "--shape", "7b"
    )
    assert found.startswith("0 "), found
    for words in ("node0 GPU 0-7", "node1 GPU 0-7", "critic_pool rank 0-7", "of 80.0 GB"):
        assert words in found
    for words in ("train", "generate", "sync", "actor optimizer", "KV cache", "cluster=ray"):
        assert words in found


def test_plan_command_names_nearest_layout_when_model_does_not_fit() -> None:
    found = plan_command(str(RECIPES / "hybrid.toml"), BF16, "--devices", "8:80GB", "--shape", "7b")
    assert found.startswith("2 "), found
    words = " ".join(found.split())
    assert "need at least" in words and "the nearest layout that fits: train." in words


def test_plan_command_needs_only_configuration_of_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(known_shape("0.5b").to_dict()))
    found = plan_command(str(RECIPES / "hybrid.toml"), f"model={tmp_path}", "--devices", "1:80GB")
    assert found.startswith("0 ") and "1 node, 1 GPUs" in found, found
