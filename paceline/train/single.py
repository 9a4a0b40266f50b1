"""The train engine of one device: a Hugging Face module, AdamW, packed micro-batches.

Parameters are only ever changed in place, so a rollout engine may read the very same ones.
"""

import contextlib
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.algo.loss import LossFn, LossTerms, TokenOutputs
from paceline.errors import CheckpointError, DataError, ModelError
from paceline.train.attention import PACKED
from paceline.train.head import PolicyHead, ValueHead
from paceline.train.lanes import Lanes
from paceline.train.optimizer import adamw, clip_gradients, load_optimizer_state, optimizer_state
from paceline.train.packing import MicroBatch, micro_batches, token_data
from paceline.train.settings import TrainSettings
from paceline.types import Batch, FloatArray

log = logging.getLogger(__name__)

LANE_PARAMETERS = 2**26  # in the gradients of all lanes together
MODEL_FILE, OPTIMIZER_FILE = "model.safetensors", "optimizer.safetensors"


class SingleDevice:
    """A TrainEngine. `head` says what the model is for: "policy" reads its output layer, "value" adds one of its own."""

    trained_file = MODEL_FILE  # where a checkpoint holds what is trained

    def __init__(
        self, model: PreTrainedModel, settings: TrainSettings, temperature: float = 1.0, head: Literal["policy", "value"] = "policy"
    ) -> None:
        self._model, self._settings = model.float(), settings
        self._backbone: nn.Module = model.base_model
        self._device = next(model.parameters()).device
        _remove_dropout(model)
        model.set_attn_implementation(PACKED)
        if settings.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._head: PolicyHead | ValueHead = _policy_head(model, temperature) if head == "policy" else ValueHead(model.config.hidden_size)
        self._head.to(self._device)
        self._parameters = self._trained_parameters()
        if isinstance(self._head, ValueHead):
            self._parameters |= {f"value_head.{name}": p for name, p in self._head.linear.named_parameters()}
        self._optimizer = adamw(self._parameters, settings)
        self._lanes = Lanes(_lane_count(self._parameters, self._device))
        self._check_model()

    @property
    def model(self) -> PreTrainedModel:
        return self._model

    def _trained_parameters(self) -> dict[str, nn.Parameter]:
        """What the optimizer changes, by the names a checkpoint has for it."""
        return dict(self._model.named_parameters())

    # -- forward and backward

    def logprobs(self, batch: Batch) -> FloatArray:
        if not isinstance(self._head, PolicyHead):
            raise ModelError("log-probs asked of a critic: this engine was built with head = 'value'; ask the actor's")
        return self._read(batch, "logprobs")

    def values(self, batch: Batch) -> FloatArray:
        if not isinstance(self._head, ValueHead):
            raise ModelError("values asked of a policy: this engine was built with head = 'policy'; ask the critic's")
        return self._read(batch, "values")

    def forward_backward(self, batch: Batch, loss_fn: LossFn) -> dict[str, float]:
        trained = int(batch.mask.sum())
        if trained == 0:
            raise DataError(f"a batch of {batch.num_rows} rows and {batch.num_tokens} tokens has no trained token: its mask is empty")
        weights = loss_fn.weights(batch)
        parameters = list(self._parameters.values())
        sums: dict[str, float] = {"loss": 0.0}
        maxima: dict[str, float] = {}

        def gradient(micro: MicroBatch) -> tuple[LossTerms, tuple[Tensor | None, ...]]:
            terms = loss_fn(self._forward(micro), token_data(batch, micro, weights))
            return terms, torch.autograd.grad(terms.loss, parameters, allow_unused=True)

        for terms, parts in self._lanes.map(gradient, self._micro_batches(batch)):
            self._lanes.alone(_add_gradient, parameters, parts)
            sums["loss"] += float(terms.loss.detach()) * trained
            for name, value in terms.sums.items():
                sums[name] = sums.get(name, 0.0) + float(value)
            for name, value in terms.maxima.items():
                maxima[name] = max(maxima.get(name, -math.inf), float(value))
        return {name: total / trained for name, total in sums.items()} | maxima

    def _micro_batches(self, batch: Batch) -> Iterator[MicroBatch]:
        return micro_batches(batch, self._settings.micro_batch_tokens, self._device, self._lanes.count)

    def _forward(self, micro: MicroBatch) -> TokenOutputs:
        # transformers recomputes activations only in train mode; without dropout the two modes are the same function.
        self._model.train(self._settings.gradient_checkpointing and torch.is_grad_enabled())
        precision = (
            contextlib.nullcontext() if self._settings.dtype == "float32" else torch.autocast(self._device.type, dtype=torch.bfloat16)
        )
        with precision:
            hidden = self._backbone(
                input_ids=micro.input_ids,
                position_ids=micro.position_ids,
                attention_mask=_NO_MASK,
                use_cache=False,
                row_layout=micro.layout,
            ).last_hidden_state[0]
        hidden = hidden.index_select(0, micro.predict).to(getattr(torch, self._settings.dtype))
        outputs: TokenOutputs = self._head(hidden, micro.targets)
        return outputs

    def _read(self, batch: Batch, name: Literal["logprobs", "values"]) -> FloatArray:
        @torch.no_grad()
        def read(micro: MicroBatch) -> tuple[MicroBatch, FloatArray]:
            return micro, getattr(self._forward(micro), name).float().cpu().numpy()

        result = np.zeros(batch.num_tokens, np.float32)
        for micro, values in self._lanes.map(read, self._micro_batches(batch)):
            result[micro.flat] = values
        return result

    # -- update

    def optimizer_step(self, lr: float) -> float:
        return self._lanes.alone(self._step, lr)

    def _step(self, lr: float) -> float:
        norm = clip_gradients(list(self._parameters.values()), self._settings.max_grad_norm)
        if math.isfinite(norm):
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        else:
            log.warning("gradient norm is %s: step skipped, weights unchanged", norm)
        self._optimizer.zero_grad()
        return norm if math.isfinite(norm) else math.nan

    # -- weights out and in

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._model.state_dict().items():
            yield name, tensor.detach()

    def save(self, folder: Path) -> None:
        (folder / self.trained_file).parent.mkdir(parents=True, exist_ok=True)
        # Copies, because safetensors refuses tensors that share storage, as fused q/k/v views do.
        weights = {name: p.detach().clone(memory_format=torch.contiguous_format) for name, p in self._parameters.items()}
        save_file(weights, folder / self.trained_file, metadata={"format": "pt"})
        save_file(optimizer_state(self._optimizer, self._parameters), folder / OPTIMIZER_FILE)
        self._model.config.save_pretrained(folder)

    def load(self, folder: Path) -> None:
        try:
            weights = load_file(folder / self.trained_file)
            state = load_file(folder / OPTIMIZER_FILE)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read the trained model in {folder}: {error}") from error
        own = {name: tuple(p.shape) for name, p in self._parameters.items()}
        saved = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        if own != saved:
            name = min(name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name))
            raise CheckpointError(
                f"{folder / self.trained_file} is of another model: {name} is {saved.get(name)} there and {own.get(name)} here"
            )
        load_optimizer_state(self._optimizer, self._parameters, state)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(weights[name])
        self._optimizer.zero_grad()

    # -- can this model be trained this way at all?

    @torch.no_grad()
    def _check_model(self) -> None:
        """Compare packed rows with the model's own forward: catches what our path does not know of, such as scaled or
        capped logits, other kinds of attention, positions that are not relative."""
        if not isinstance(self._head, PolicyHead):
            return
        lengths = np.array([7, 4], np.int32)
        tokens = (np.arange(11) * 7 % self._model.config.vocab_size).astype(np.int32)
        mask = np.ones(11, np.bool_)
        mask[[0, 7]] = False
        zeros = np.zeros(11, np.float32)
        found = self.logprobs(Batch(tokens, lengths, mask, zeros, tokens, zeros[:2], lengths))
        expected = np.zeros(11, np.float32)
        for row in (slice(0, 7), slice(7, 11)):
            ids = torch.from_numpy(tokens[row].astype(np.int64)).to(self._device)[None]
            logp = (self._model(input_ids=ids, use_cache=False).logits[0, :-1].float() / self._head.temperature).log_softmax(-1)
            expected[row.start + 1 : row.stop] = logp.gather(1, ids[0, 1:, None])[:, 0].cpu().numpy()
        gap = float(np.abs(found - expected).max())
        if not gap <= (1e-3 if self._settings.dtype == "float32" else 0.3):
            raise ModelError(
                f"{type(self._model).__name__} cannot be trained packed: its log-probs differ by {gap:.2g} from its own plain forward. "
                "Supported are plain decoders (Llama, Qwen2, Qwen3 and their like) without capped or scaled logits"
            )


def _lane_count(parameters: dict[str, nn.Parameter], device: torch.device) -> int:
    """One for each thread, if the model is small: every lane has a gradient of its own, and what large models compute divides well."""
    threads = torch.get_num_threads()
    small = threads * sum(p.numel() for p in parameters.values()) <= LANE_PARAMETERS
    return threads if device.type == "cpu" and small else 1


def _add_gradient(parameters: list[nn.Parameter], parts: tuple[Tensor | None, ...]) -> None:
    for parameter, part in zip(parameters, parts, strict=True):
        if part is not None and parameter.grad is None:
            parameter.grad = part
        elif part is not None and parameter.grad is not None:
            parameter.grad.add_(part)


_NO_MASK = torch.zeros(1, 1, 1, 1)  # a ready-made 4-d mask keeps transformers from building a [T, T] one; ours ignores it


def _policy_head(model: PreTrainedModel, temperature: float) -> PolicyHead:
    output = model.get_output_embeddings()
    if not isinstance(output, nn.Linear):
        raise ModelError(f"{type(model).__name__} has no linear output layer: a causal language model is needed")
    return PolicyHead(output, temperature or 1.0)  # at temperature 0 (greedy) log-probs are those at 1


def _remove_dropout(model: PreTrainedModel) -> None:
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
