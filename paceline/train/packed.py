"""A Hugging Face decoder and what is read off it, run over packed rows: what single device and sharded engines have in common."""

import contextlib
import logging
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.algo.loss import LossTerms, TokenOutputs
from paceline.errors import DataError, ModelError
from paceline.train.attention import PACKED
from paceline.train.head import PolicyHead, ValueHead
from paceline.train.packing import MicroBatch, micro_batches
from paceline.train.settings import TrainSettings
from paceline.types import Batch, FloatArray

log = logging.getLogger(__name__)

Head = Literal["policy", "value"]


class PackedModel(nn.Module):
    """`head` says what the model is for: "policy" reads its output layer, "value" adds one of its own."""

    def __init__(self, model: PreTrainedModel, settings: TrainSettings, temperature: float = 1.0, head: Head = "policy") -> None:
        super().__init__()
        self._settings = settings
        self.model = model.float()
        remove_dropout(model)
        model.set_attn_implementation(PACKED)
        if settings.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.head: PolicyHead | ValueHead = _policy_head(model, temperature) if head == "policy" else ValueHead(model.config.hidden_size)
        self.head.to(next(model.parameters()).device)
        self.fused: Callable[[MicroBatch], TokenOutputs] | None = None  # what computes in place of the module
        if isinstance(self.head, PolicyHead):
            self._plain = plain_logprobs(model, self.head.temperature)
            self.check(lambda micro: self(micro)["logprobs"])

    def forward(self, micro: MicroBatch) -> dict[str, Tensor]:
        """The fields of TokenOutputs, by name: FSDP finds tensors in a dict, but not in a class it does not know."""
        outputs = self._through_the_module(micro) if self.fused is None else self.fused(micro)
        found = {"logprobs": outputs.logprobs, "entropy": outputs.entropy, "values": outputs.values}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def _through_the_module(self, micro: MicroBatch) -> TokenOutputs:
        device, dtype = micro.input_ids.device.type, self._settings.dtype
        # transformers recomputes activations only in train mode; without dropout the two modes are the same function.
        self.model.train(self._settings.gradient_checkpointing and torch.is_grad_enabled())
        with contextlib.nullcontext() if dtype == "float32" else torch.autocast(device, dtype=torch.bfloat16):
            hidden = self.model.base_model(
                input_ids=micro.input_ids,
                position_ids=micro.position_ids,
                attention_mask=_NO_MASK,
                use_cache=False,
                row_layout=micro.layout,
            ).last_hidden_state[0]
        outputs: TokenOutputs = self.head(hidden.index_select(0, micro.predict).to(getattr(torch, dtype)), micro.targets)
        return outputs

    @torch.no_grad()
    def check(self, logprobs: Callable[[MicroBatch], Tensor]) -> None:
        """Can this model be trained this way at all? Compare packed rows with the model's own forward: catches what our path does not
        know of, such as scaled or capped logits, other kinds of attention, positions that are not relative."""
        device, found = next(self.model.parameters()).device, np.zeros_like(self._plain)
        for micro in micro_batches(_few_rows(self.model), 4096, device):
            found[micro.flat] = logprobs(micro).float().cpu().numpy()
        gap = float(np.abs(found - self._plain).max())
        if not gap <= (1e-3 if self._settings.dtype == "float32" else 0.3):
            raise ModelError(
                f"{type(self.model).__name__} cannot be trained packed: its log-probs differ by {gap:.2g} from its own plain forward. "
                "Supported are plain decoders (Llama, Qwen2, Qwen3 and their like) without capped or scaled logits"
            )

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """All parameters by the names a checkpoint has for them; tied ones once."""
        return dict(self.model.named_parameters()) | self.value_parameters()

    def value_parameters(self) -> dict[str, nn.Parameter]:
        """Those of the value head, if there is one."""
        linear = self.head.linear if isinstance(self.head, ValueHead) else nn.Identity()
        return {f"value_head.{name}": p for name, p in linear.named_parameters()}

    def require(self, head: Head) -> None:
        if isinstance(self.head, PolicyHead) != (head == "policy"):
            what, who, other = ("log-probs", "critic", "actor") if head == "policy" else ("values", "policy", "critic")
            built = "value" if head == "policy" else "policy"
            raise ModelError(f"{what} asked of a {who}: this engine was built with head = {built!r}; ask the {other}'s")


@torch.no_grad()
def plain_logprobs(model: PreTrainedModel, temperature: float) -> FloatArray:
    """What the model itself says of a few rows, one after the other."""
    batch, device = _few_rows(model), next(model.parameters()).device
    found = np.zeros(batch.num_tokens, np.float32)
    for start, stop in pairwise(batch.offsets):
        ids = torch.from_numpy(batch.tokens[start:stop].astype(np.int64)).to(device)[None]
        logp = (model(input_ids=ids, use_cache=False).logits[0, :-1].float() / temperature).log_softmax(-1)
        found[start + 1 : stop] = logp.gather(1, ids[0, 1:, None])[:, 0].cpu().numpy()
    return found


def _few_rows(model: PreTrainedModel) -> Batch:
    lengths = np.array([7, 4], np.int32)
    tokens = (np.arange(11) * 7 % model.config.vocab_size).astype(np.int32)
    mask = np.ones(11, np.bool_)
    mask[[0, 7]] = False
    zeros = np.zeros(11, np.float32)
    return Batch(tokens, lengths, mask, zeros, tokens, zeros[:2], lengths)


class Tally:
    """Loss and diagnostics of a batch, added up over its micro-batches."""

    def __init__(self, batch: Batch) -> None:
        self._trained = int(batch.mask.sum())
        if self._trained == 0:
            raise DataError(f"a batch of {batch.num_rows} rows and {batch.num_tokens} tokens has no trained token: its mask is empty")
        self._loss = 0.0
        self._sums: dict[str, float] = {}
        self._maxima: dict[str, float] = {}
        self._unread: list[tuple[list[str], list[str], Tensor]] = []

    def add(self, terms: LossTerms) -> None:
        """Looked at later, all numbers of a micro-batch at once: who looks waits for the device."""
        values = torch.stack([value.detach().double() for value in (terms.loss, *terms.sums.values(), *terms.maxima.values())])
        self._unread.append((list(terms.sums), list(terms.maxima), values))

    def merge(self, loss: float, sums: dict[str, float], maxima: dict[str, float]) -> None:
        self._loss += loss
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        for name, value in maxima.items():
            self._maxima[name] = max(self._maxima.get(name, -math.inf), value)

    def totals(self) -> tuple[float, dict[str, float], dict[str, float]]:
        """What another tally can be given to `merge`."""
        for sums, maxima, tensor in self._unread:
            loss, *values = tensor.tolist()
            self.merge(loss, dict(zip(sums, values, strict=False)), dict(zip(maxima, values[len(sums) :], strict=True)))
        self._unread.clear()
        return self._loss, self._sums, self._maxima

    def metrics(self) -> dict[str, float]:
        loss, sums, maxima = self.totals()
        return {"loss": loss} | {name: total / self._trained for name, total in sums.items()} | maxima


_NO_MASK = torch.zeros(1, 1, 1, 1)  # a ready-made 4-d mask keeps transformers from building a [T, T] one; ours ignores it


def _policy_head(model: PreTrainedModel, temperature: float) -> PolicyHead:
    output = model.get_output_embeddings()
    if not isinstance(output, nn.Linear):
        raise ModelError(f"{type(model).__name__} has no linear output layer: a causal language model is needed")
    return PolicyHead(output, temperature or 1.0)  # at temperature 0 (greedy) log-probs are those at 1


def remove_dropout(model: PreTrainedModel) -> None:
    """Training must see the function that sampled."""
    found = False
    for module in model.modules():
        names = ["p"] if isinstance(module, nn.Dropout) else [name for name in vars(module) if "dropout" in name]
        for name in names:
            value = getattr(module, name)
            if isinstance(value, float) and value > 0:
                found = True
                setattr(module, name, 0.0)
    if found:
        log.warning("%s has dropout; set to 0, since training must see the policy that sampled", type(model).__name__)
