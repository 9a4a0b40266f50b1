"""A Hugging Face decoder and what is read off it, run over packed rows: what single device and sharded engines have in common."""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from paceline.algo.loss import LossTerms, TokenData, TokenOutputs
from paceline.errors import DataError, ModelError
from paceline.model.attention import PACKED
from paceline.model.loading import EXACT, model_body
from paceline.model.packing import MicroBatch, micro_batches, upload
from paceline.train.head import PolicyHead, ValueHead
from paceline.train.settings import TrainSettings
from paceline.types import Batch, FloatArray

log = logging.getLogger(__name__)

Head = Literal["policy", "value"]


class PackedModel(nn.Module):
    """`head` says what the model is for: "policy" reads its output layer, "value" adds one of its own."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: TrainSettings,
        temperature: float = 1.0,
        head: Head = "policy",
    ) -> None:
        super().__init__()
        self._settings = settings
        self.model = model.float()
        remove_dropout(model)
        self._set_attention("eager")  # what the model itself says: with every part of its attention
        try:
            states = plain_states(model)
            if head == "policy":
                self._plain = plain_logprobs(
                    model, temperature or 1.0
                )  # at temperature 0 (greedy) log-probs are those at 1
                self.head: PolicyHead | ValueHead = _policy_head(model, temperature or 1.0)
            else:
                self.head = ValueHead(states.shape[1])
        except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise ModelError(
                f"{type(model).__name__} cannot be trained: it does not make logits from tokens alone ({error})"
            ) from error
        self.head.to(states.device)
        self._set_attention(PACKED)
        if settings.gradient_checkpointing:
            if not model.supports_gradient_checkpointing:
                raise ModelError(
                    f"{type(model).__name__} cannot recompute its activations: unset train.gradient_checkpointing"
                )
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        model.eval()
        self._recompute = [
            module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
        ] or [*model.modules()]
        self.fused: Callable[[MicroBatch], TokenOutputs] | None = (
            None  # what computes in place of the module
        )
        self._padded = not self._can_pack(states)
        if head == "policy":
            self.check(lambda micro: self._through_the_module(micro, "float32").logprobs, EXACT)

    def forward(self, micro: MicroBatch) -> dict[str, Tensor]:
        """The fields of TokenOutputs, by name: FSDP finds tensors in a dict, but not in a class it does not know."""
        outputs = (
            self._through_the_module(micro, self._settings.dtype)
            if self.fused is None
            else self.fused(micro)
        )
        found = {"logprobs": outputs.logprobs, "entropy": outputs.entropy, "values": outputs.values}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def _through_the_module(self, micro: MicroBatch, dtype: str) -> TokenOutputs:
        device = micro.input_ids.device.type
        rounded = (
            contextlib.nullcontext()
            if dtype == "float32"
            else torch.autocast(device, dtype=torch.bfloat16)
        )
        with rounded, self._recomputing():
            hidden = (
                self._from_padded_rows(micro) if self._padded else self._from_packed_rows(micro)
            )
        outputs: TokenOutputs = self.head(hidden.to(getattr(torch, dtype)), micro.targets)
        return outputs

    @contextlib.contextmanager
    def _recomputing(self) -> Iterator[None]:
        """transformers recomputes activations only in train mode. Nobody but the layers is in it: training must see the policy that
        sampled, and in that mode some models add noise, or want inputs that we do not have."""
        wanted = self._settings.gradient_checkpointing and torch.is_grad_enabled()
        for module in self._recompute if wanted else ():
            module.training = True
        try:
            yield
        finally:
            for module in self._recompute if wanted else ():
                module.training = False

    def _from_packed_rows(self, micro: MicroBatch) -> Tensor:
        """[M, hidden]"""
        states: Tensor = model_body(self.model)(
            input_ids=micro.input_ids,
            position_ids=micro.position_ids,
            attention_mask=_NO_MASK,
            use_cache=False,
            row_layout=micro.layout,
        ).last_hidden_state
        return states[0].index_select(0, micro.predict)

    def _from_padded_rows(self, micro: MicroBatch) -> Tensor:
        """The same with nothing asked of the model: rows one below the other. What is behind their end no token of theirs sees."""
        layout = micro.layout
        ids = micro.input_ids[0].index_select(0, layout.spread).view(layout.rows, layout.longest)
        states: Tensor = model_body(self.model)(input_ids=ids, use_cache=False).last_hidden_state
        return states.flatten(0, 1).index_select(0, layout.slots.index_select(0, micro.predict))

    def _set_attention(self, name: str) -> None:
        if self.model._can_set_attn_implementation():  # some have only one
            self.model.set_attn_implementation(name)

    @torch.no_grad()
    def _can_pack(self, plain: Tensor) -> bool:
        """Does the model hand its layers what packed rows need, and do they know nothing else that these do without?"""
        if "chunked_attention" in (
            getattr(self.model.config.get_text_config(), "layer_types", None) or ()
        ):
            return False
        try:
            micros = list(micro_batches(_few_rows(self.model), 4096, plain.device))
            gap = max(
                float((self._from_packed_rows(micro) - plain[micro.flat]).abs().max())
                for micro in micros
            )
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            log.info(
                "%s takes no packed rows (%s): they are padded", type(self.model).__name__, error
            )
            return False
        return gap <= 1e-3 * max(1.0, float(plain.abs().max()))

    @torch.no_grad()
    def check(self, logprobs: Callable[[MicroBatch], Tensor | None], limit: float) -> None:
        """Can this model be trained this way at all? Compare with the model's own forward: catches what our path does not know of, such
        as an output layer that does more than multiply, scale and cap. The less likely a token, the more rounding matters to it."""
        device, found = next(self.model.parameters()).device, np.zeros_like(self._plain)
        for micro in micro_batches(_few_rows(self.model), 4096, device):
            said = logprobs(micro)
            assert said is not None, "a policy's"
            found[micro.flat] = said.float().cpu().numpy()
        gap = float((np.abs(found - self._plain) / (1 + np.abs(self._plain))).mean())
        if not gap <= limit:
            raise ModelError(
                f"{type(self.model).__name__} cannot be trained: its log-probs differ by {gap:.2g} (relative, on average) from its own "
                f"plain forward; at most {limit:g} was expected. Needed is a causal language model whose output layer does no more than "
                "multiply, scale and cap"
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
            what, who, other = (
                ("log-probs", "critic", "actor")
                if head == "policy"
                else ("values", "policy", "critic")
            )
            built = "value" if head == "policy" else "policy"
            raise ModelError(
                f"{what} asked of a {who}: this engine was built with head = {built!r}; ask the {other}'s"
            )


def plain_logprobs(model: PreTrainedModel, temperature: float) -> FloatArray:
    """What the model itself says of a few rows, one after the other."""
    found: list[Tensor] = []
    for ids in _rows_alone(model):
        with torch.no_grad():
            logp = (
                model(input_ids=ids, use_cache=False).logits[0, :-1].float() / temperature
            ).log_softmax(-1)
        found += [logp.new_zeros(1), logp.gather(1, ids[0, 1:, None])[:, 0]]
    return torch.cat(found).cpu().numpy()


@torch.no_grad()
def plain_states(model: PreTrainedModel) -> Tensor:
    """[T, hidden] the state that speaks of each token of these rows; 0 for the first of a row."""
    states = [
        model_body(model)(input_ids=ids, use_cache=False).last_hidden_state[0]
        for ids in _rows_alone(model)
    ]
    return torch.cat([torch.cat((row.new_zeros(1, row.shape[1]), row[:-1])) for row in states])


def _rows_alone(model: PreTrainedModel) -> list[Tensor]:
    batch, device = _few_rows(model), next(model.parameters()).device
    return [
        torch.from_numpy(batch.tokens[start:stop].astype(np.int64)).to(device)[None]
        for start, stop in pairwise(batch.offsets)
    ]


def _few_rows(model: PreTrainedModel) -> Batch:
    lengths = np.array([7, 4], np.int32)
    tokens = (np.arange(11) * 7 % model.config.get_text_config().vocab_size).astype(np.int32)
    mask = np.ones(11, np.bool_)
    mask[[0, 7]] = False
    zeros = np.zeros(11, np.float32)
    return Batch(tokens, lengths, mask, zeros, tokens, zeros[:2], lengths)


def token_data(batch: Batch, micro: MicroBatch, weights: FloatArray) -> TokenData:
    """Return what the loss needs of the trained tokens of one micro-batch."""
    device = micro.predict.device

    def pick(array: NDArray[np.float32] | NDArray[np.int32] | None) -> Tensor | None:
        return None if array is None else upload(array[micro.flat], device)

    logprobs, versions, weight = pick(batch.logprobs), pick(batch.versions), pick(weights)
    assert logprobs is not None and versions is not None and weight is not None
    return TokenData(
        rows=micro.rows,
        weights=weight,
        logprobs=logprobs,
        versions=versions,
        advantages=pick(batch.advantages),
        returns=pick(batch.returns),
        values=pick(batch.values),
        ref_logprobs=pick(batch.ref_logprobs),
    )


class LossAccumulator:
    """Loss and diagnostics of a batch, added up over its micro-batches."""

    def __init__(self, batch: Batch) -> None:
        self._trained = int(batch.mask.sum())
        if self._trained == 0:
            raise DataError(
                f"a batch of {batch.num_rows} rows and {batch.num_tokens} tokens has no trained token: its mask is empty"
            )
        self._loss = 0.0
        self._sums: dict[str, float] = {}
        self._maxima: dict[str, float] = {}
        self._unread: list[tuple[list[str], list[str], Tensor]] = []

    def add(self, terms: LossTerms) -> None:
        """Looked at later, all numbers of a micro-batch at once: who looks waits for the device."""
        values = torch.stack(
            [
                value.detach().double()
                for value in (terms.loss, *terms.sums.values(), *terms.maxima.values())
            ]
        )
        self._unread.append((list(terms.sums), list(terms.maxima), values))

    def merge(self, loss: float, sums: dict[str, float], maxima: dict[str, float]) -> None:
        self._loss += loss
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        for name, value in maxima.items():
            before = self._maxima.get(name, -math.inf)
            self._maxima[name] = (
                value if value > before or math.isnan(value) else before
            )  # max() would lose a nan

    def totals(self) -> tuple[float, dict[str, float], dict[str, float]]:
        """What another tally can be given to `merge`."""
        for sums, maxima, tensor in self._unread:
            loss, *values = tensor.tolist()
            self.merge(
                loss,
                dict(zip(sums, values, strict=False)),
                dict(zip(maxima, values[len(sums) :], strict=True)),
            )
        self._unread.clear()
        return self._loss, self._sums, self._maxima

    def metrics(self) -> dict[str, float]:
        loss, sums, maxima = self.totals()
        return (
            {"loss": loss} | {name: total / self._trained for name, total in sums.items()} | maxima
        )


_NO_MASK = torch.zeros(
    1, 1, 1, 1
)  # a ready-made 4-d mask keeps transformers from building a [T, T] one; ours ignores it


@torch.no_grad()
def _policy_head(model: PreTrainedModel, temperature: float) -> PolicyHead:
    """What the model does between its last hidden state and its logits: a product, and for some a cap, or a factor, which has a name of its
    own in every model and so is measured."""
    output = model.get_output_embeddings()
    if not isinstance(output, nn.Linear):
        raise ModelError(
            f"{type(model).__name__} has no linear output layer: a causal language model is needed"
        )
    cap, factor = getattr(model.config.get_text_config(), "final_logit_softcapping", None), 1.0
    if cap is None:
        ids = _rows_alone(model)[0]
        raw = output(model_body(model)(input_ids=ids, use_cache=False).last_hidden_state).double()
        measured = float(
            (model(input_ids=ids, use_cache=False).logits.double() * raw).sum()
            / raw.square().sum().clamp_min(1e-30)
        )
        factor = 1.0 if abs(measured - 1) < 1e-5 or not measured > 0 else measured
    return PolicyHead(output, temperature, cap, factor)


def remove_dropout(model: PreTrainedModel) -> None:
    """Training must see the function that sampled."""
    found = False
    for module in model.modules():
        names = (
            ["p"]
            if isinstance(module, nn.Dropout)
            else [name for name in vars(module) if "dropout" in name]
        )
        for name in names:
            value = getattr(module, name)
            if isinstance(value, float) and value > 0:
                found = True
                setattr(module, name, 0.0)
    if found:
        log.warning(
            "%s has dropout; set to 0, since training must see the policy that sampled",
            type(model).__name__,
        )
