"""The train engine of one device: a Hugging Face module, AdamW, packed micro-batches.

Parameters are only ever changed in place, so a rollout engine may read the very same ones.
"""

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.algo.loss import LossFn, LossTerms, TokenData, TokenOutputs
from paceline.model.engine_weights import engine_weights
from paceline.model.loading import ROUNDED
from paceline.model.packing import MicroBatch, grouped_micro_batches, micro_batches, token_data
from paceline.model.weights import EngineWeights
from paceline.train.colocated import ColocatedEngine
from paceline.train.fused import fused_policy
from paceline.train.micro_batch_threads import MicroBatchThreads
from paceline.train.offload import HostOffload, Moved
from paceline.train.optimizer import adamw, clip_gradients, optimizer_state
from paceline.train.out_of_memory import memory_explained
from paceline.train.packed import Head, LossAccumulator, PackedModel
from paceline.train.settings import TrainSettings
from paceline.train.training_state import MODEL_FILE, load_training, save_training
from paceline.types import Batch, FloatArray

log = logging.getLogger(__name__)

THREAD_PARAMETERS = 2**26  # in the gradients of all lanes together


class SingleDevice:
    """A TrainEngine. `head` says what the model is for: "policy" reads its output layer, "value" adds one of its own."""

    trained_file = MODEL_FILE  # where a checkpoint holds what is trained

    def __init__(
        self,
        model: PreTrainedModel,
        settings: TrainSettings,
        temperature: float = 1.0,
        head: Head = "policy",
    ) -> None:
        self._settings = settings
        self._packed = PackedModel(model, settings, temperature, head)
        self._model: PreTrainedModel = model
        self._device = next(model.parameters()).device
        self._parameters = self._trained_parameters() | self._packed.value_parameters()
        self._optimizer = adamw(self._parameters, settings)
        self._fused = (
            fused_policy(model, self._parameters, settings, temperature)
            if head == "policy"
            else None
        )
        if self._fused is not None:
            self._packed.check(self._fused.logprobs, ROUNDED)
        self._threads = MicroBatchThreads(_thread_count(self._parameters, self._device))
        self._host_offload = HostOffload()
        self._shares_weights = False
        self.colocated: list[ColocatedEngine] = []

    @property
    def model(self) -> PreTrainedModel:
        return self._model

    def shared_weights(self, max_length: int) -> EngineWeights:
        """The weights as an engine for sequences of this length wants them, for a reader at any time: what training computes with, not a
        copy. From now on `place` leaves them where they are."""
        self._shares_weights = True
        return (
            self._fused.weights
            if self._fused is not None
            else engine_weights(self._model, share=True, max_length=max_length)
        )

    def copied_weights(self, max_length: int) -> EngineWeights:
        """A copy of the weights for such an engine, in the type of products on a GPU; `current_weights` brings it up to date."""
        narrow = torch.bfloat16 if self._fused is not None else None
        return engine_weights(self._model, share=False, max_length=max_length, dtype=narrow)

    def current_weights(self) -> dict[str, Tensor]:
        """Every weight by name, tied ones once, as training computes with them."""
        return (
            dict(self._fused.weights.named)
            if self._fused is not None
            else {n: p.detach() for n, p in self._model.named_parameters()}
        )

    def _trained_parameters(self) -> dict[str, nn.Parameter]:
        """What the optimizer changes, by the names a checkpoint has for it."""
        return dict(self._model.named_parameters())

    # -- forward and backward

    def logprobs(self, batch: Batch) -> FloatArray:
        self._packed.require("policy")
        return self._read(batch, "logprobs")

    def values(self, batch: Batch) -> FloatArray:
        self._packed.require("value")
        return self._read(batch, "values")

    def forward_backward(self, batch: Batch, loss_fn: LossFn) -> dict[str, float]:
        tally, weights = LossAccumulator(batch), loss_fn.weights(batch)
        self._my_turn()
        with self._memory_explained():
            if self._fused is None:
                self._module_gradient(batch, loss_fn, weights, tally)
            else:
                for micro in self._micro_batches(batch):
                    data = token_data(batch, micro, weights)
                    tally.add(self._fused.add_gradient(micro, partial(_loss_of, loss_fn, data)))
            return tally.metrics()

    def _module_gradient(
        self, batch: Batch, loss_fn: LossFn, weights: FloatArray, tally: LossAccumulator
    ) -> None:
        parameters = list(self._parameters.values())

        def gradient(micro: MicroBatch) -> tuple[LossTerms, tuple[Tensor | None, ...]]:
            terms = loss_fn(TokenOutputs(**self._packed(micro)), token_data(batch, micro, weights))
            return terms, torch.autograd.grad(terms.loss, parameters, allow_unused=True)

        for terms, parts in self._threads.map(gradient, self._micro_batches(batch)):
            self._threads.alone(_add_gradient, parameters, parts)
            tally.add(terms)

    def _micro_batches(self, batch: Batch) -> Iterator[MicroBatch]:
        if self._fused is not None:
            return grouped_micro_batches(batch, self._settings.micro_batch_tokens, self._device)
        return micro_batches(
            batch, self._settings.micro_batch_tokens, self._device, self._threads.count
        )

    def _read(self, batch: Batch, name: Literal["logprobs", "values"]) -> FloatArray:
        @torch.no_grad()
        def read(micro: MicroBatch) -> tuple[MicroBatch, FloatArray]:
            found = (
                self._packed(micro)[name] if self._fused is None else self._fused.logprobs(micro)
            )
            return micro, found.float().cpu().numpy()

        result = np.zeros(batch.num_tokens, np.float32)
        with self._memory_explained():
            for micro, values in self._threads.map(read, self._micro_batches(batch)):
                result[micro.flat] = values
        return result

    # -- update

    def optimizer_step(self, lr: float) -> float:
        with self._memory_explained():
            return self._threads.alone(self._step, lr)

    def _step(self, lr: float) -> float:
        norm = clip_gradients(list(self._parameters.values()), self._settings.max_grad_norm)
        if math.isfinite(norm):
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        else:
            log.warning("gradient norm is %s: step skipped, weights unchanged", norm)
        self._optimizer.zero_grad()
        if self._fused is not None:
            self._fused.weights_changed()
        return norm if math.isfinite(norm) else math.nan

    # -- weights out and in

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._model.state_dict().items():
            yield name, tensor.detach()

    def save(self, folder: Path) -> None:
        save_training(
            folder,
            self.trained_file,
            self._parameters,
            optimizer_state(self._optimizer, self._parameters),
        )
        self._model.config.save_pretrained(folder)

    def load(self, folder: Path) -> None:
        shapes = {name: tuple(p.shape) for name, p in self._parameters.items()}
        load_training(folder, self.trained_file, self._parameters, self._optimizer, shapes)
        self._optimizer.zero_grad()
        if self._fused is not None:
            self._fused.weights_changed()

    def place(self, where: Literal["device", "host"]) -> Moved:
        if where == "host":
            return self._host_offload.offload(self._movable())
        self._my_turn()
        return self._host_offload.restore()

    def _my_turn(self) -> None:
        for other in self.colocated:
            if other.release_device is not None:
                other.release_device()

    def _movable(self) -> Iterable[Tensor]:
        yield from (p.grad for p in self._parameters.values() if p.grad is not None)
        yield from (tensor for state in self._optimizer.state.values() for tensor in state.values())
        if self._fused is not None:
            yield from self._packed.parameters()
            yield from () if self._shares_weights else self._fused.weights.named.values()
        elif not self._shares_weights:
            yield from self._packed.parameters()

    def _memory_explained(self) -> AbstractContextManager[None]:
        return memory_explained(self._device, self._settings, self._held)

    def _held(self) -> dict[str, int]:
        state = (tensor for state in self._optimizer.state.values() for tensor in state.values())
        held = {
            "parameters": _bytes(self._packed.parameters()),
            "their bfloat16 copy": _bytes(self._fused.weights.named.values())
            if self._fused is not None
            else 0,
            "gradients": _bytes(p.grad for p in self._parameters.values() if p.grad is not None),
            "optimizer state": _bytes(state),
        }
        return held | {other.name: other.held() for other in self.colocated}


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _loss_of(loss_fn: LossFn, data: TokenData, outputs: TokenOutputs) -> LossTerms:
    return loss_fn(outputs, data)


def _thread_count(parameters: dict[str, nn.Parameter], device: torch.device) -> int:
    """One for each thread, if the model is small: every lane has a gradient of its own, and what large models compute divides well."""
    threads = torch.get_num_threads()
    small = threads * sum(p.numel() for p in parameters.values()) <= THREAD_PARAMETERS
    return threads if device.type == "cpu" and small else 1


def _add_gradient(parameters: list[nn.Parameter], parts: tuple[Tensor | None, ...]) -> None:
    for parameter, part in zip(parameters, parts, strict=True):
        if part is not None and parameter.grad is None:
            parameter.grad = part
        elif part is not None and parameter.grad is not None:
            parameter.grad.add_(part)
