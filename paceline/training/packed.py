"""Hugging Face decoder with a policy or value head, run over packed rows.

The single-device engine and the FSDP engine share it.
"""

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from paceline.algo.loss import TokenData, TokenOutputs
from paceline.errors import ModelError
from paceline.model.attention import PACKED
from paceline.model.linear import speed_up_linears
from paceline.model.loading import EXACT, model_body
from paceline.model.packing import MicroBatch, micro_batches, upload
from paceline.training.head import PolicyHead, ValueHead
from paceline.training.settings import TrainSettings
from paceline.types import Batch, FloatArray

log = logging.getLogger(__name__)

Head = Literal["policy", "value"]
# What models raise for inputs that they do not support.
REJECTIONS = (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError)


class PackedModel(nn.Module):
    """A decoder with a head: "policy" is the model's output layer, "value" adds a value head."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: TrainSettings,
        temperature: float = 1.0,
        head: Head = "policy",
        checked: "PackedModel | None" = None,
    ) -> None:
        """Check the model by forward passes, unless it has no weights yet: then `checked` is one
        that was created with an excerpt of it."""
        super().__init__()
        self._settings = settings
        self.model = model.float()
        remove_dropout(model)
        # torch would give the padding token no gradient, but rows have no padding, and a policy
        # may sample this token like any other.
        model.get_input_embeddings().padding_idx = None
        self.head: PolicyHead | ValueHead
        self._padded: bool
        states: Tensor | None = None
        if checked is None:
            states = self._compute_plainly(temperature or 1.0, head)
        else:
            self.head, self._padded = checked.head.for_model(model), checked._padded
        self._set_attention(PACKED)
        speed_up_linears(model)
        if settings.gradient_checkpointing:
            if not model.supports_gradient_checkpointing:
                raise ModelError(
                    f"train.gradient_checkpointing = true: {type(model).__name__} does not support "
                    "it; set it to false"
                )
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        model.eval()
        self._recompute = [
            module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
        ] or [*model.modules()]
        # Replacement for the module's forward pass, if set.
        self.fused: Callable[[MicroBatch], TokenOutputs] | None = None
        if states is not None:
            self._padded = not self._can_pack(states)
        if head == "policy" and checked is None:
            self.check(lambda micro: self._module_forward(micro, "float32").logprobs, EXACT)

    def _compute_plainly(self, temperature: float, head: Head) -> Tensor:
        """Run the model without packing; set its head and return the hidden states.

        At temperature 0 (greedy), log-probs are those at temperature 1.
        """
        model = self.model
        self._set_attention("eager")  # the reference: implements every feature of the model
        try:
            states = plain_states(model)
            if head == "policy":
                self._plain = plain_logprobs(model, temperature)
                self.head = _policy_head(model, temperature)
            else:
                self.head = ValueHead(states.shape[1])
        except REJECTIONS as error:
            raise ModelError(
                f"{type(model).__name__} cannot be trained: it does not compute logits from tokens "
                f"alone ({error}); use a causal language model"
            ) from error
        self.head.to(states.device)
        return states

    def forward(self, micro: MicroBatch) -> dict[str, Tensor]:
        """Return the fields of TokenOutputs as a dict, in which FSDP finds tensors."""
        outputs = (
            self._module_forward(micro, self._settings.dtype)
            if self.fused is None
            else self.fused(micro)
        )
        fields = {
            "logprobs": outputs.logprobs,
            "entropy": outputs.entropy,
            "values": outputs.values,
        }
        return {name: tensor for name, tensor in fields.items() if tensor is not None}

    def _module_forward(self, micro: MicroBatch, dtype: str) -> TokenOutputs:
        device = micro.input_ids.device.type
        autocast = torch.autocast(device, dtype=torch.bfloat16, enabled=dtype != "float32")
        with autocast, self._recomputing():
            hidden = self._padded_rows(micro) if self._padded else self._packed_rows(micro)
        return self.head(hidden.to(getattr(torch, dtype)), micro.targets)

    @contextlib.contextmanager
    def _recomputing(self) -> Iterator[None]:
        """Set the layers to train mode, the only one in which transformers recomputes activations.

        All other modules stay in evaluation mode: in train mode some models add noise, so that
        training would not compute the policy that sampled, or require more inputs.
        """
        wanted = self._settings.gradient_checkpointing and torch.is_grad_enabled()
        for module in self._recompute if wanted else ():
            module.training = True
        try:
            yield
        finally:
            for module in self._recompute if wanted else ():
                module.training = False

    def _packed_rows(self, micro: MicroBatch) -> Tensor:
        """Return the hidden states [M, hidden] of one packed sequence."""
        states: Tensor = model_body(self.model)(
            input_ids=micro.input_ids,
            position_ids=micro.position_ids,
            attention_mask=_NO_MASK,
            use_cache=False,
            row_layout=micro.layout,
        ).last_hidden_state
        return states[0].index_select(0, micro.predict)

    def _padded_rows(self, micro: MicroBatch) -> Tensor:
        """Return the hidden states of a padded batch, which needs no support from the model.

        Padding follows the tokens of a row, so causal attention ignores it.
        """
        layout = micro.layout
        ids = micro.input_ids[0].index_select(0, layout.spread).view(layout.rows, layout.longest)
        states: Tensor = model_body(self.model)(input_ids=ids, use_cache=False).last_hidden_state
        return states.flatten(0, 1).index_select(0, layout.slots.index_select(0, micro.predict))

    def _set_attention(self, name: str) -> None:
        if self.model._can_set_attn_implementation():  # some models have only one
            self.model.set_attn_implementation(name)

    @torch.no_grad()
    def _can_pack(self, plain: Tensor) -> bool:
        """Return whether the model computes the same hidden states for packed rows."""
        if "chunked_attention" in (
            getattr(self.model.config.get_text_config(), "layer_types", None) or ()
        ):
            return False
        try:
            micros = list(micro_batches(_sample_rows(self.model), 4096, plain.device))
            difference = max(
                float((self._packed_rows(micro) - plain[micro.flat]).abs().max())
                for micro in micros
            )
        except REJECTIONS as error:
            log.info(
                "%s does not support packed rows (%s); padding them instead",
                type(self.model).__name__,
                error,
            )
            return False
        return difference <= 1e-3 * max(1.0, float(plain.abs().max()))

    @torch.no_grad()
    def check(self, logprobs: Callable[[MicroBatch], Tensor | None], limit: float) -> None:
        """Raise ModelError if `logprobs` differs from the model's plain forward pass.

        This detects unsupported features, such as an output layer that does more than multiply,
        scale and cap. Differences are relative, because rounding affects unlikely tokens more.
        """
        device, found = next(self.model.parameters()).device, np.zeros_like(self._plain)
        for micro in micro_batches(_sample_rows(self.model), 4096, device):
            values = logprobs(micro)
            assert values is not None, "only a policy is checked"
            found[micro.flat] = values.float().cpu().numpy()
        difference = float((np.abs(found - self._plain) / (1 + np.abs(self._plain))).mean())
        if not difference <= limit:
            raise ModelError(
                f"{type(self.model).__name__} cannot be trained: its log-probs differ by "
                f"{difference:.2g} (relative, on average) from a plain forward pass; expected at "
                f"most {limit:g}. Use a causal language model whose output layer only multiplies, "
                "scales and caps"
            )

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Return all parameters by their names in a checkpoint; tied weights appear once."""
        return dict(self.model.named_parameters()) | self.value_parameters()

    def value_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the value head, if there is one."""
        linear = self.head.linear if isinstance(self.head, ValueHead) else nn.Identity()
        return {f"value_head.{name}": p for name, p in linear.named_parameters()}


def plain_logprobs(model: PreTrainedModel, temperature: float) -> FloatArray:
    """Return the log-probs of the sample rows by plain forward passes, row by row."""
    found: list[Tensor] = []
    for ids in _separate_rows(model):
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            logp = (logits / temperature).log_softmax(-1)
        found += [logp.new_zeros(1), logp.gather(1, ids[0, 1:, None])[:, 0]]
    return torch.cat(found).cpu().numpy()


@torch.no_grad()
def plain_states(model: PreTrainedModel) -> Tensor:
    """Return the hidden state [T, hidden] that predicts each token; 0 for the first of a row."""
    states = [
        model_body(model)(input_ids=ids, use_cache=False).last_hidden_state[0]
        for ids in _separate_rows(model)
    ]
    return torch.cat([torch.cat((row.new_zeros(1, row.shape[1]), row[:-1])) for row in states])


def _separate_rows(model: PreTrainedModel) -> list[Tensor]:
    batch, device = _sample_rows(model), next(model.parameters()).device
    return [
        torch.from_numpy(batch.tokens[start:stop].astype(np.int64)).to(device)[None]
        for start, stop in pairwise(batch.offsets)
    ]


def _sample_rows(model: PreTrainedModel) -> Batch:
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


class EngineWithHead(ABC):
    """The reading half of a train engine: log-probs of a policy, values of a critic."""

    _head: Head

    def logprobs(self, batch: Batch) -> FloatArray:
        if self._head != "policy":
            raise ModelError(
                "a critic has no log-probs: this engine was created with head = 'value'; use the "
                "actor's engine"
            )
        return self._read(batch, "logprobs")

    def values(self, batch: Batch) -> FloatArray:
        if self._head != "value":
            raise ModelError(
                "a policy has no values: this engine was created with head = 'policy'; use the "
                "critic's engine"
            )
        return self._read(batch, "values")

    @abstractmethod
    def _read(self, batch: Batch, name: Literal["logprobs", "values"]) -> FloatArray: ...


# A 4-d mask keeps transformers from building a [T, T] mask; packed attention ignores it.
_NO_MASK = torch.zeros(1, 1, 1, 1)


@torch.no_grad()
def _policy_head(model: PreTrainedModel, temperature: float) -> PolicyHead:
    """Return the model's map from hidden states to logits: a matmul, capped or scaled in some.

    Every architecture names its factor differently, so it is measured.
    """
    output = model.get_output_embeddings()
    if not isinstance(output, nn.Linear):
        raise ModelError(
            f"{type(model).__name__} has no linear output layer; use a causal language model"
        )
    cap, factor = getattr(model.config.get_text_config(), "final_logit_softcapping", None), 1.0
    if cap is None:
        ids = _separate_rows(model)[0]
        raw = output(model_body(model)(input_ids=ids, use_cache=False).last_hidden_state).double()
        logits = model(input_ids=ids, use_cache=False).logits.double()
        measured = float((logits * raw).sum() / raw.square().sum().clamp_min(1e-30))
        factor = 1.0 if abs(measured - 1) < 1e-5 or not measured > 0 else measured
    return PolicyHead(output, temperature, cap, factor)


def remove_dropout(model: PreTrainedModel) -> None:
    """Set dropout to 0, because training must compute the policy that sampled."""
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
            "%s has dropout; setting it to 0, because training must compute the sampling policy",
            type(model).__name__,
        )
