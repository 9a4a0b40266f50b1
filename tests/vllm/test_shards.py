"""Weights that reach the leader of an engine over the network: each rank gets only its shard."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from paceline.config import RunConfig, load_config
from paceline.data.tiny import make_tokenizer
from paceline.errors import SyncError
from paceline.remote.process import process_group
from paceline.remote.worker import Worker
from paceline.rollout.client import EngineClient
from paceline.rollout.shards import Shard
from paceline.rollout.tensor_parallel import Follower
from paceline.sync.block import WeightBlock, block_size, layout_of
from paceline.sync.shared_memory import BlockTarget
from paceline.sync.transport import TARGET, Load
from paceline.sync.weights import Weights
from paceline.types import Request, Role, Sampling
from paceline.workers.build import build_parts, first_rank_only
from tests.vllm.faults import received_parts

VOCABULARY, HEAD = 256, 32  # vLLM on CPUs needs heads of at least 32
# nan in it makes the second rank fail between two parts of a layer, infinity while it loads one
FAILS = "model.layers.0.self_attn.v_proj.weight"


class AlternatingTarget(BlockTarget):
    """Passes odd versions on as if they had arrived over the network: in private memory."""

    def load(self, weights: Weights, into: Load) -> None:
        if weights.version % 2 == 0:
            return super().load(weights, into)
        self.block.verify(weights)
        into([(n, tensor.clone()) for n, tensor in self.block.tensors.items()], weights.version)


class Probe:
    def __init__(self, ranks: Any) -> None:
        self._ranks = ranks

    def received(self) -> Mapping[int, int]:
        return self._ranks.received


def build(roles: Sequence[Role], config: RunConfig, path: str, threads: int) -> Mapping[str, Any]:
    """Build an engine whose second rank cannot load nan and infinity."""
    parts = build_parts(roles, config, path, threads)
    rollout = parts[Role.ROLLOUT]
    if not isinstance(rollout, Follower):
        return {**parts, "probe": Probe(rollout._engine._ranks)}
    load = rollout._load

    def checked(named: tuple[str, Tensor]) -> tuple[str, Tensor]:
        name, tensor = named
        parts = received_parts(tensor) if name == FAILS else []
        if any(part.isnan().any() for part in parts):
            raise ValueError(f"nan in {name}")
        if any(part.isinf().any() for part in parts) and isinstance(tensor, Shard):
            tensor._source._parts.clear()  # type: ignore[attr-defined]
        return named

    rollout._load = lambda incoming: load(map(checked, incoming))  # type: ignore[method-assign]
    return parts


class Engine:
    def __init__(self, worker: Worker, block: WeightBlock, model: PreTrainedModel) -> None:
        self._worker, self._block, self.model = worker, block, model
        self._client = EngineClient(worker)
        self._version = 0

    async def load(self) -> int:
        """Load the model's weights and return the bytes that the second rank received."""
        self._version += 1
        checksum = self._block.write(self.model.state_dict().items())
        await self._client.load_weights(Weights(self._version, checksum))
        received = await self._worker.call("probe", "received")
        return int(received[1])

    async def generate(self) -> list[tuple[list[int], list[float]]]:
        prompts = [tuple(range(3, 8 + n)) for n in range(4)]
        completions = await asyncio.gather(
            *(
                self._client.generate(
                    Request(f"{self._version}-{n}", prompt, 0, Sampling(16, temperature=0.0))
                )
                for n, prompt in enumerate(prompts)
            )
        )
        return [(each.tokens.tolist(), each.logprobs.tolist()) for each in completions]

    def change(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))


@asynccontextmanager
async def engine(split: str, tmp_path: Path, **shape: Any) -> AsyncIterator[Engine]:
    directory = str(tmp_path / "model")
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=4 * HEAD,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        **shape,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    settings = [
        f"model={directory}",
        "rollout.engine=vllm",
        "rollout.vllm.eager=true",
        "rollout.slots=8",
        "data.max_prompt_length=32",
        "rollout.max_response_length=32",
        "data.task=copy:3",
        f"rollout.{split}_parallel=2",
        "placement.rollout=rollout",
    ]
    args = ((Role.ROLLOUT,), load_config(None, settings), directory, 1)
    first_only = {*first_rank_only([Role.ROLLOUT]), "probe"}
    worker = process_group(
        "rollout", build, args, ranks=2, threads=1, log_folder=tmp_path, first_only=first_only
    )
    await worker.ready()
    layout = layout_of(model.state_dict().items())
    path = tmp_path / "weights"
    path.write_bytes(bytes(block_size(layout)))
    await worker.call(TARGET, "open", AlternatingTarget, str(path), layout)
    try:
        yield Engine(worker, WeightBlock(str(path), layout), model)
    finally:
        await worker.close()


def tensor_bytes(name: str, size: int, copied: Sequence[str]) -> int:
    return size if "norm" in name or any(each in name for each in copied) else size // 2


def stage_bytes(name: str, size: int, _: Sequence[str]) -> int:
    """Return what the second stage reads: vLLM loads tied weights under both names."""
    return size if name.startswith(("model.layers.1.", "model.norm", "model.embed", "lm_")) else 0


Bytes = Callable[[str, int, Sequence[str]], int]


@pytest.mark.parametrize(
    ("split", "shape", "expected", "copied"),
    [
        ("tensor", {"num_key_value_heads": 2}, tensor_bytes, ()),
        # More ranks than key-value heads: each has a copy of one.
        ("tensor", {"num_key_value_heads": 1}, tensor_bytes, ("k_proj", "v_proj")),
        ("pipeline", {"num_key_value_heads": 2, "tie_word_embeddings": True}, stage_bytes, ()),
    ],
    ids=["tensor", "tensor, copied heads", "stages, tied weights"],
)
def test_rank_receives_only_its_shard_and_engine_generates_the_same(
    split: str, shape: dict[str, Any], expected: Bytes, copied: Sequence[str], tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with asyncio.timeout(240), engine(split, tmp_path, **shape) as it:
            weights = it.model.state_dict().items()
            shard = sum(expected(name, tensor.nbytes, copied) for name, tensor in weights)
            for _ in range(2):
                assert await it.load() == shard
                over_network = await it.generate()
                assert await it.load() == 0  # from the file
                assert await it.generate() == over_network
                it.change()
                assert await it.load() == shard
                assert await it.generate() != over_network
                assert await it.load() == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("number", "problem"),
    [
        (torch.nan, f"rank 1: ValueError: nan in {FAILS}"),
        (torch.inf, f"rank 1: SyncError: {FAILS}: the loader did not do the same"),
    ],
    ids=["between tensors", "in a tensor"],
)
def test_failing_load_of_one_rank_raises_and_the_next_succeeds(
    number: float, problem: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with (
            asyncio.timeout(240),
            engine("tensor", tmp_path, num_key_value_heads=2) as it,
        ):
            shard = await it.load()
            expected = await it.generate()
            await it.load()
            norm = it.model.get_parameter(FAILS)
            with torch.no_grad():
                kept = norm.clone()
                norm.fill_(number)
                with pytest.raises(SyncError, match=problem):
                    await it.load()
                norm.copy_(kept)
            await it.load()  # from the file
            # All of a tensor of which the rank has read other elements than before.
            added = kept.nbytes // 2 if math.isinf(number) else 0
            assert await it.load() == shard + added
            assert await it.generate() == expected

    asyncio.run(scenario())
