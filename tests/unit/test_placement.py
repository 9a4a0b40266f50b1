"""Placement: which device each role gets, and whether it fits into memory."""

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.config import RunConfig, load_config
from paceline.errors import ConfigError, WorkerDied
from paceline.model.loading import load_config as model_config
from paceline.types import Role
from paceline.workers import local
from paceline.workers.cluster import Device, Node, PlannedWorker
from paceline.workers.devices import ResourcePool, split
from paceline.workers.fit import check_fit
from paceline.workers.phase_memory import Models
from paceline.workers.pools import plan_workers, start_worker
from tests.processes import children

GB = 1 << 30
SEPARATE = ["placement.actor=train", "placement.rollout=rollout"]
SPLIT = [
    "algorithm.name=ppo",
    "placement.actor=actor_rollout_ref_pool",
    "placement.rollout=actor_rollout_ref_pool",
    "placement.critic=critic_pool",
]
THREE_POOLS = ["placement.critic=critic", "placement.ref=ref"]


def plan(nodes: Sequence[Node], *settings: str) -> dict[str, PlannedWorker]:
    return {worker.name: worker for worker in plan_workers(load_config(None, settings), nodes)}


def where(worker: PlannedWorker) -> list[str]:
    return [str(device) for device in worker.devices]


def spans(worker: PlannedWorker) -> str:
    """Return the devices by node, for example a0-3 b0."""
    found: dict[str, list[int]] = {}
    for device in worker.devices:
        found.setdefault(device.node, []).append(device.index)
    return " ".join(
        f"{node}{each[0]}-{each[-1]}" if len(each) > 1 else f"{node}{each[0]}"
        for node, each in found.items()
    )


def devices(pool: ResourcePool) -> list[str]:
    return [str(device) for device in pool.devices]


@pytest.mark.parametrize(
    ("nodes", "first", "second"),
    [
        ([Node("a", 8, gpus=4)], ["a:0", "a:1"], ["a:2", "a:3"]),
        ([Node("a", 8, gpus=3)], ["a:0", "a:1"], ["a:2"]),
        ([Node("a", 2)], ["a:0"], ["a:1"]),
        ([Node("a", 1)], ["a:0"], ["a:0"]),
        ([Node("a", 8, gpus=1), Node("b", 8, gpus=2)], ["a:0"], ["b:0", "b:1"]),
        ([Node("a", 1), Node("b", 1), Node("c", 1)], ["a:0", "b:0"], ["c:0"]),
    ],
)
def test_split_halves_devices_of_one_machine_or_machines(
    nodes: list[Node], first: list[str], second: list[str]
) -> None:
    actor, critic = split(nodes)
    assert (actor.name, critic.name) == ("actor_rollout_ref_pool", "critic_pool")
    assert (devices(actor), devices(critic)) == (first, second)


def test_split_pools_put_actor_and_critic_on_different_halves() -> None:
    one = plan([Node("a", 8, gpus=4)], *SPLIT)
    assert where(one["actor_rollout_ref_pool"]) == ["a:0"] and where(one["critic_pool"]) == ["a:2"]
    two = plan(
        [Node("a", 8, gpus=2), Node("b", 8, gpus=4)],
        *SPLIT,
        "train.backend=fsdp",
        "placement.train_ranks=2",
    )
    assert where(two["actor_rollout_ref_pool"]) == ["a:0", "a:1"]
    assert where(two["critic_pool"]) == ["b:0", "b:1"]


def test_ranks_span_nodes_only_when_one_node_is_too_small() -> None:
    nodes = [Node("small", 8, gpus=1), Node("large", 8, gpus=3)]
    fsdp = [*SEPARATE, "train.backend=fsdp"]
    near = plan(nodes, *fsdp, "placement.train_ranks=3")
    assert where(near["train"]) == ["large:0", "large:1", "large:2"]
    assert where(near["rollout"]) == ["small:0"]
    far = plan(nodes, *fsdp, "placement.train_ranks=4")
    assert where(far["train"]) == ["small:0", "large:0", "large:1", "large:2"]
    assert where(far["rollout"]) == ["small:0"], "no device is free, so one is shared"
    with pytest.raises(ConfigError, match="pool 'train' needs 5 GPUs for its ranks and has 4"):
        plan(nodes, *fsdp, "placement.train_ranks=5")


FSDP = ["train.backend=fsdp"]
RECIPES = Path(__file__).parents[2] / "recipes"
EIGHT, ONE, CPU = [Node("a", 64, gpus=8)], [Node("a", 8, gpus=1)], [Node("a", 8)]
TWO = [Node("a", 64, gpus=8), Node("b", 64, gpus=8)]
THREE = [*TWO, Node("c", 64, gpus=8)]
TWO_STAGES = ["rollout.tensor_parallel=2", "rollout.pipeline_parallel=2"]


@pytest.mark.parametrize(
    ("nodes", "settings", "layout"),
    [
        # one pool
        (EIGHT, [], {"main": "a0"}),
        (EIGHT, FSDP, {"main": "a0-7"}),
        (TWO, FSDP, {"main": "a0-7 b0-7"}),
        (CPU, FSDP, {"main": "a0"}),
        (CPU, [*FSDP, "train.tensor_parallel=2"], {"main": "a0-1"}),
        ([Node("a", 8, gpus=7)], [*FSDP, "train.tensor_parallel=2"], {"main": "a0-5"}),
        (EIGHT, [*FSDP, "placement.train_ranks=3"], {"main": "a0-2"}),
        # a trainer and engines
        (EIGHT, SEPARATE, {"train": "a0"} | {f"rollout-{n}": f"a{n + 1}" for n in range(7)}),
        (
            EIGHT,
            [*SEPARATE, *FSDP, "placement.rollout_workers=1"],
            {"train": "a1-7", "rollout": "a0"},
        ),
        (ONE, [*SEPARATE, *FSDP], {"train": "a0", "rollout": "a0"}),
        (CPU, [*SEPARATE, *FSDP], {"train": "a0", "rollout": "a1"}),
        (
            EIGHT,
            [*SEPARATE, *FSDP, "placement.train_ranks=6"],
            {"train": "a0-5", "rollout-0": "a6", "rollout-1": "a7"},
        ),
        (
            TWO,
            [*SEPARATE, *FSDP, "rollout.engine=vllm", *TWO_STAGES],
            {"train": "a0-7", "rollout-0": "b0-3", "rollout-1": "b4-7"},
        ),
        # two halves
        (EIGHT, [*SPLIT, *FSDP], {"actor_rollout_ref_pool": "a0-3", "critic_pool": "a4-7"}),
        (TWO, [*SPLIT, *FSDP], {"actor_rollout_ref_pool": "a0-7", "critic_pool": "b0-7"}),
        (
            THREE,
            [*SPLIT, *FSDP],
            {"actor_rollout_ref_pool": "a0-7 b0-3", "critic_pool": "b4-7 c0-7"},
        ),
        (CPU, [*SPLIT, *FSDP], {"actor_rollout_ref_pool": "a0", "critic_pool": "a4"}),
        # three pools
        (
            EIGHT,
            [*FSDP, "algorithm.name=ppo", "algorithm.kl_coef=0.1", *THREE_POOLS],
            {"main": "a0-2", "critic": "a3-5", "ref": "a6-7"},
        ),
        (
            THREE,
            [*FSDP, "algorithm.name=ppo", "algorithm.kl_coef=0.1", *THREE_POOLS],
            {"main": "a0-7", "critic": "b0-7", "ref": "c0-7"},
        ),
    ],
)
def test_pools_without_counts_use_every_device(
    nodes: list[Node], settings: list[str], layout: dict[str, str]
) -> None:
    found = {name: spans(worker) for name, worker in plan(nodes, *settings).items()}
    assert found == {name.removesuffix("-0"): place for name, place in layout.items()}


def test_split_recipe_uses_half_of_eight_devices_for_each_pool() -> None:
    found = plan_workers(load_config(RECIPES / "split.toml"), EIGHT)
    assert [(worker.ranks, spans(worker)) for worker in found] == [(4, "a0-3"), (4, "a4-7")]


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        (["placement.train_ranks=9"], "set placement.train_ranks to at most 8"),
        (["placement.train_ranks=12", "train.tensor_parallel=3"], "to at most 6"),
        (["train.tensor_parallel=16"], "set train.tensor_parallel x .* to at most 8"),
    ],
)
def test_plan_says_what_fits_when_ranks_exceed_gpus(settings: list[str], advice: str) -> None:
    with pytest.raises(ConfigError, match=f"pool 'main' needs .* GPUs .* and has 8; .*{advice}"):
        plan(EIGHT, *FSDP, *settings)


@pytest.mark.parametrize(
    ("settings", "pool"),
    [
        ([], "main"),
        (["algorithm.name=ppo"], "main"),
        (["algorithm.name=ppo", "placement.critic=critic"], "critic"),
        (["algorithm.name=ppo", "placement.critic=critic", "placement.reward=judge"], "judge"),
    ],
)
def test_reward_model_lives_with_critic_by_default(settings: list[str], pool: str) -> None:
    found = plan(CPU, "reward.model=some/model", *settings)
    assert [name for name, worker in found.items() if Role.REWARD in worker.roles] == [pool]


def test_engines_share_devices_only_when_none_is_free() -> None:
    found = plan([Node("a", 4), Node("b", 2)], *SEPARATE, "placement.rollout_workers=4")
    places = [["a:0"], ["a:1"], ["a:2"], ["a:3"], ["b:0"]]
    assert [where(worker) for worker in found.values()] == places
    assert {worker.threads for worker in found.values()} == {1}
    crowded = plan([Node("a", 2)], *SEPARATE, "placement.rollout_workers=3")
    assert [where(worker) for worker in crowded.values()] == [["a:0"], ["a:1"], ["a:0"], ["a:1"]]


def test_node_without_gpu_gets_no_worker_when_others_have_gpus() -> None:
    found = plan([Node("cpu", 64), Node("gpu", 8, gpus=2)], *SEPARATE)
    assert [where(worker) for worker in found.values()] == [["gpu:0"], ["gpu:1"]]


def test_workers_are_pinned_to_cores_when_there_are_enough() -> None:
    node = Node("a", 4, cores=(0, 1, 2, 3))
    assert [worker.cores for worker in plan([node], *SEPARATE).values()] == [(0, 1), (2, 3)]
    crowded = plan([node], *SEPARATE, "placement.rollout_workers=4")
    assert [worker.cores for worker in crowded.values()] == [()] * 5
    assert plan([node])["main"].cores == (), "a single worker may use every core"
    ranks = plan([node], *SEPARATE, "train.backend=fsdp", "placement.train_ranks=3")
    assert ranks["train"].cores == (0, 1, 2) and ranks["rollout"].cores == (3,)


def fit(config: RunConfig, model: str, nodes: Sequence[Node]) -> list[str]:
    models = Models.of(config, model_config(model))
    return check_fit(plan_workers(config, nodes), nodes, config, models)


GPU: dict[str, Any] = {"cpus": 8, "gpus": 2, "memory": 64 * GB}


def test_fit_fails_when_model_exceeds_memory(model: str) -> None:
    config = load_config(None, [*SEPARATE, f"model={model}"])
    on_gpu = r"GPU a:0 has 0\.0 GB, .* need at least 1\.0 GB \(train 1\.0 GB\)"
    with pytest.raises(ConfigError, match=on_gpu):
        fit(config, model, [Node("a", **GPU, gpu_memory=100_000)])
    on_cpu = r"node a has 0\.1 GB.* at least 0\.7 GB \(train 0\.4 GB, rollout 0\.4 GB\)"
    with pytest.raises(ConfigError, match=on_cpu):
        fit(config, model, [Node("a", 2, memory=100 << 20)])


def test_fit_warns_only_when_memory_is_scarce(model: str) -> None:
    config = load_config(None, [*SEPARATE, f"model={model}"])
    (warning,) = fit(config, model, [Node("a", **GPU, gpu_memory=(1 << 30) + (20 << 20))])
    assert "micro_batch_tokens" in warning
    assert fit(config, model, [Node("a", **GPU, gpu_memory=80 * GB)]) == []
    assert fit(config, model, [Node("a", 2, memory=0)]) == [], "0: the size is unknown"


def test_roles_of_one_pool_share_worker() -> None:
    (worker,) = plan([Node("a", 2)]).values()
    assert worker.alone and set(worker.roles) == {Role.ACTOR, Role.ROLLOUT}
    assert worker.devices == (Device("a", 0),)


def test_each_pool_has_worker() -> None:
    nodes = [Node("a", 2)]
    four = plan(
        nodes,
        *SEPARATE,
        "algorithm.name=ppo",
        "algorithm.kl_coef=0.1",
        "placement.critic=critic",
        "placement.ref=ref",
    )
    assert list(four) == ["train", "rollout", "critic", "ref"]
    assert not any(worker.alone for worker in four.values())


def test_plan_command_prints_table(model: str, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(
        f'model = "{model}"\ndata.task = "copy:3"\n'
        '[algorithm]\nname = "ppo"\n[placement]\ncritic = "critic_pool"\n'
    )
    shown = CliRunner(env={"COLUMNS": "140"}).invoke(app, ["plan", str(tmp_path / "r.toml")])
    assert shown.exit_code == 0, shown.output
    for word in ("main", "critic_pool", "actor", "rollout", "critic", "GB"):
        assert word in shown.output


@pytest.mark.parametrize("command", ["plan", "train"])
def test_command_fails_before_start_when_model_does_not_fit(
    command: str, model: str, tmp_path: Path
) -> None:
    giant = shutil.copytree(model, tmp_path / "giant")
    shape = json.loads((giant / "config.json").read_text()) | {
        "hidden_size": 1 << 18,
        "intermediate_size": 1 << 18,
    }
    (giant / "config.json").write_text(json.dumps(shape))
    (tmp_path / "r.toml").write_text(
        f'model = "{giant}"\nrun_dir = "{tmp_path}/run"\n[data]\ntask = "copy:3"\n'
    )
    runner = CliRunner(env={"COLUMNS": "140"})
    result = runner.invoke(app, [command, str(tmp_path / "r.toml"), *SEPARATE])
    assert result.exit_code == 2, result.output
    for words in ("need at least", "(train ", "a smaller model"):
        assert words in result.output
    assert not (tmp_path / "run").exists() and not children()


def test_engine_in_separate_pool_is_not_tensor_parallel(model: str) -> None:
    ranks = ["train.backend=megatron", "train.tensor_parallel=2", "placement.train_ranks=2"]
    config = load_config(None, [*SEPARATE, *ranks, f"model={model}"])
    assert fit(config, model, [Node("a", 8, gpus=3, memory=64 * GB, gpu_memory=80 * GB)]) == []


def test_added_worker_gets_least_used_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(local, "_count_gpus", lambda: (3, 80 << 30))
    cluster = local.LocalCluster(load_config(), "model", tmp_path)
    planned = [("train", 0), ("rollout", 1), ("rollout-1", 1)]
    workers = [
        PlannedWorker(name, (), devices=(Device("local", index),)) for name, index in planned
    ]
    assert [cluster.gpus(worker) for worker in workers] == [[0], [1], [1]]
    added = ("rollout-2", "rollout-3", "rollout-2")  # the last one replaces the first
    assert [cluster.gpus(PlannedWorker(name, ())) for name in added] == [[2], [0], [2]]


def test_added_group_gets_gpu_for_each_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(local, "_count_gpus", lambda: (4, 80 << 30))
    cluster = local.LocalCluster(load_config(), "model", tmp_path)
    devices = (Device("local", 0), Device("local", 1))
    assert cluster.gpus(PlannedWorker("rollout", (), 2, devices=devices)) == [0, 1]
    assert cluster.gpus(PlannedWorker("rollout-1", (), 2)) == [2, 3]
    with pytest.raises(ConfigError, match="worker 'big' needs 8 GPUs, and this machine has 4"):
        cluster.gpus(PlannedWorker("big", (), 8))


def test_plan_fails_when_no_node_has_device() -> None:
    with pytest.raises(ConfigError, match="no node has a GPU or a CPU slot"):
        plan_workers(load_config(), [Node("head", 0)])


def test_worker_that_joins_has_deadline_before_its_process_exists() -> None:
    class Full:
        async def start(self, plan: PlannedWorker) -> Any:
            await asyncio.Event().wait()

    with pytest.raises(WorkerDied, match="worker 'late' was not ready within start_timeout_s"):
        asyncio.run(asyncio.wait_for(start_worker(Full(), PlannedWorker("late", ()), 0.05), 60))  # type: ignore[arg-type]
