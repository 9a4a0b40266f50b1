"""What a loader reads is recorded without elements, and enough to load the same later."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.errors import SyncError
from paceline.rollout.shards import Plan, plan_reads, receive
from paceline.sync.block import layout_of

CPU = torch.device("cpu")
WEIGHT = torch.arange(96, dtype=torch.float32).reshape(8, 12)
SIZE = WEIGHT.nbytes

Read = Callable[[Tensor, Tensor], None]  # of a weight, into an empty parameter of the same shape


def rows(weight: Tensor, empty: Tensor) -> None:
    empty[:4].copy_(weight.narrow(0, 4, 4))


def columns(weight: Tensor, empty: Tensor) -> None:
    empty[:, :3] = weight[:, 9:]


def one_copied_head(weight: Tensor, empty: Tensor) -> None:
    for copy in range(3):
        empty.data.narrow(0, 2 * copy, 2).copy_(weight.narrow(0, 2, 2))


def fused(weight: Tensor, empty: Tensor) -> None:
    for place, part in enumerate(weight.chunk(2, dim=0)):
        empty[place].copy_(part[1])


def transposed(weight: Tensor, empty: Tensor) -> None:
    empty.view(12, 8)[:, :2].copy_(weight.t().contiguous()[:, :2])


def transposed_slice(weight: Tensor, empty: Tensor) -> None:
    empty.view(12, 8)[:6].copy_(weight.t()[6:].contiguous())


def experts(weight: Tensor, empty: Tensor) -> None:
    for expert in weight.view(4, 2, 12).unbind()[2:]:
        empty[:2].add_(expert)


def padded(weight: Tensor, empty: Tensor) -> None:
    shard = weight.narrow(0, 6, 2)
    empty[: shard.shape[0]].data.copy_(shard)
    empty[shard.shape[0] :].data.fill_(0)


def converted(weight: Tensor, empty: Tensor) -> None:
    empty[:2].copy_(weight[2:4].to(torch.float64) * 2)


def permuted(weight: Tensor, empty: Tensor) -> None:
    empty[:4].copy_(weight[:4].view(2, 2, 12).transpose(0, 1).reshape(4, 12))


def as_bytes(weight: Tensor, empty: Tensor) -> None:
    empty.view(torch.uint8)[:2].copy_(weight.view(torch.uint8)[2:4])


def flattened(weight: Tensor, empty: Tensor) -> None:
    empty.view(-1)[:10].copy_(weight.flatten()[20:30])


def counted_first(weight: Tensor, empty: Tensor) -> None:
    rows(weight, torch.empty(8, 12, device="meta"))  # as vLLM does
    rows(weight, empty)


def one_element(weight: Tensor, empty: Tensor) -> None:
    empty[0, 0].fill_(weight[3, 3].item())


def everything(weight: Tensor, empty: Tensor) -> None:
    empty.copy_(weight * 2)


def changed_in_place(weight: Tensor, empty: Tensor) -> None:
    empty[:2].copy_(weight.mul_(2)[:2])


def reshaped_in_place(weight: Tensor, empty: Tensor) -> None:
    empty[:1].copy_(weight.unsqueeze_(0)[0, :1])


def nothing(weight: Tensor, empty: Tensor) -> None:
    assert weight.shape == (8, 12) and weight.dtype == torch.float32 and weight.device == CPU


READS: dict[Read, int] = {
    rows: SIZE // 2,
    columns: SIZE // 4,
    one_copied_head: SIZE // 4,
    fused: SIZE // 4,
    transposed: SIZE,
    transposed_slice: SIZE // 2,
    experts: SIZE // 2,
    padded: SIZE // 4,
    converted: SIZE // 4,
    permuted: SIZE // 2,
    as_bytes: SIZE // 4,
    flattened: 40,
    counted_first: SIZE // 2,
    one_element: 4,
    everything: SIZE,
    changed_in_place: SIZE,
    reshaped_in_place: SIZE,
    nothing: 0,
}


class Loader:
    """Loads two tensors: one as given, one always by rows."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self.loaded: dict[str, Tensor] = {}

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            parameter = torch.nn.Parameter(torch.zeros(8, 12), requires_grad=False)
            (self._read if name == "a" else rows)(tensor, parameter)
            self.loaded[name] = parameter


def weights() -> dict[str, Tensor]:
    return {"a": WEIGHT.clone(), "b": WEIGHT + 100}


LAYOUT = layout_of(weights().items())


def sizes(plan: Plan) -> dict[str, int]:
    return {name: sum(part.nbytes for part in parts) for name, parts in plan.items()}


def load_parts(loader: Loader, plan: Plan, missed: Callable[[str], None] = print) -> None:
    """Load with only the parts of the plan, in the order in which they are sent."""
    sent = [part.view(weights()[name]) for name, _, _ in LAYOUT for part in plan.get(name, ())]

    def fill(part: Tensor) -> None:
        part.copy_(sent.pop(0))

    loader.load(receive(plan, LAYOUT, CPU, fill, missed))
    assert not sent


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("read", READS, ids=lambda read: read.__name__)
def test_loader_gets_same_elements_from_parts_it_reads(read: Read, mode: Any) -> None:
    whole, loader = Loader(read), Loader(read)
    with mode():
        whole.load(weights().items())
        plan = plan_reads(loader.load, LAYOUT, CPU)
        load_parts(loader, plan)
    found = sizes(plan)
    assert found.pop("b") == SIZE // 2
    assert found == ({"a": READS[read]} if READS[read] else {})
    for name, tensor in whole.loaded.items():
        assert torch.equal(loader.loaded[name], tensor), name


def test_loader_that_leaves_dispatcher_gets_whole_tensors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def as_array(weight: Tensor, empty: Tensor) -> None:
        empty.copy_(torch.from_numpy(weight.numpy()))

    loader = Loader(as_array)
    with caplog.at_level(logging.WARNING):
        plan = plan_reads(loader.load, LAYOUT, CPU)
    assert sizes(plan) == {"a": SIZE, "b": SIZE}
    assert "this rank gets whole tensors" in caplog.text
    load_parts(loader, plan)
    assert torch.equal(loader.loaded["a"], WEIGHT)


def test_next_plan_has_whole_tensor_when_loader_reads_otherwise_than_recorded() -> None:
    rank = 0

    def moving(weight: Tensor, empty: Tensor) -> None:
        empty[:2].copy_(weight.narrow(0, rank, 2))

    loader, missed = Loader(moving), set[str]()
    plan = plan_reads(loader.load, LAYOUT, CPU)
    rank = 4
    with pytest.raises(SyncError, match=r"a: the loader did not do the same as before"):
        load_parts(loader, plan, missed.add)
    plan = plan_reads(loader.load, LAYOUT, CPU, missed)
    assert sizes(plan) == {"a": SIZE, "b": SIZE // 2}
    load_parts(loader, plan)
    assert torch.equal(loader.loaded["a"][:2], WEIGHT[4:6])
