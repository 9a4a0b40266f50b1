"""Train engine for one device: a Hugging Face module, AdamW and packed micro-batches.

The engine changes parameters only in place, so a rollout engine can share their memory.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
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
from paceline.model.hub_names import HubFormat, TensorFormat, stored_tensors
from paceline.model.loading import ROUNDED, default_device, model_body
from paceline.model.packing import MicroBatch, grouped_micro_batches, micro_batches
from paceline.model.stored_weights import load_onto
from paceline.model.tensor_file import TensorFiles
from paceline.model.weights import EngineWeights
from paceline.training.colocated import ColocatedEngine
from paceline.training.fused import fused_policy
from paceline.training.loss_accumulator import LossAccumulator
from paceline.training.micro_batch_threads import MicroBatchThreads
from paceline.training.offload import HostOffload, Moved
from paceline.training.optimizer import adamw, clip_gradients, optimizer_state
from paceline.training.out_of_memory import explain_out_of_memory
from paceline.training.packed import EngineWithHead, Head, PackedModel, token_data
from paceline.training.settings import TrainSettings
from paceline.training.training_state import (
    layout_of,
    load_training,
    role_of,
    save_optimizer,
    write_model,
)
from paceline.types import Batch, FloatArray

# Limit on the gradient elements of all micro-batch threads together; each thread has a gradient.
THREAD_PARAMETERS = 2**26


class SingleDevice(EngineWithHead):
    """A TrainEngine. Head "policy" is the model's output layer; "value" adds a value head."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: TrainSettings,
        temperature: float = 1.0,
        head: Head = "policy",
    ) -> None:
        self._settings, self._head = settings, head
        hub = HubFormat(model) if head == "policy" else None
        self._packed = PackedModel(model, settings, temperature, head)
        self._model: PreTrainedModel = model
        self._device = next(model.parameters()).device
        self._parameters = self._trained_parameters() | self._packed.value_parameters()
        self._tensors = {**stored_tensors(model), **self._packed.value_parameters()}
        self._form = hub or TensorFormat(self._tensors)
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

    @classmethod
    def open(
        cls, model_path: str, settings: TrainSettings, temperature: float, head: Head
    ) -> "SingleDevice":
        """Load the model in float32 (train.dtype is the compute dtype) onto the default device."""
        model = load_onto(model_path, default_device())
        return cls(model if head == "policy" else model_body(model), settings, temperature, head)

    @property
    def model(self) -> PreTrainedModel:
        return self._model

    def rollout_weights(self, max_length: int, copy: bool) -> EngineWeights | None:
        """Return weights for a rollout engine in the same worker; None: it loads its own."""
        return self.copied_weights(max_length) if copy else self.shared_weights(max_length)

    def shared_weights(self, max_length: int) -> EngineWeights:
        """Return the weights that training computes with, not a copy, for a rollout engine.

        From now on `place` leaves them on the device. `max_length` is the engine's maximum
        sequence length.
        """
        self._shares_weights = True
        return (
            self._fused.weights
            if self._fused is not None
            else engine_weights(self._model, share=True, max_length=max_length)
        )

    def copied_weights(self, max_length: int) -> EngineWeights:
        """Return a copy of the weights for a rollout engine, in bfloat16 if training is fused.

        The engine updates the copy from `current_weights`.
        """
        dtype = torch.bfloat16 if self._fused is not None else None
        return engine_weights(self._model, share=False, max_length=max_length, dtype=dtype)

    def current_weights(self) -> Mapping[str, Tensor]:
        """Return the weights that training computes with, by name; tied weights appear once."""
        return (
            dict(self._fused.weights.named)
            if self._fused is not None
            else {n: p.detach() for n, p in self._model.named_parameters()}
        )

    def named_weights(self) -> Mapping[str, Tensor]:
        """Return the weights in float32 by Hugging Face name, tied weights under each name."""
        return dict(self.export_weights())

    def limit_launches(self) -> None:
        """Let an engine on another thread launch its kernels without delay."""
        if self._fused is not None:
            self._fused.limit_launches()

    def _trained_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that the optimizer updates, by their names in a checkpoint.

        Some architectures freeze a parameter, such as the bias with which a router selects experts.
        """
        return {name: p for name, p in self._model.named_parameters() if p.requires_grad}

    # -- forward and backward

    def forward_backward(self, batch: Batch, loss_fn: LossFn) -> dict[str, float]:
        totals, weights = LossAccumulator(batch), loss_fn.weights(batch)
        self._claim_device()
        with self._explain_out_of_memory():
            if self._fused is None:
                self._module_gradient(batch, loss_fn, weights, totals)
            else:
                for micro in self._micro_batches(batch):
                    data = token_data(batch, micro, weights)
                    loss = partial(_loss_of, loss_fn, data)
                    totals.add(self._fused.add_gradient(micro, loss))
            return totals.metrics()

    def _module_gradient(
        self, batch: Batch, loss_fn: LossFn, weights: FloatArray, totals: LossAccumulator
    ) -> None:
        parameters = list(self._parameters.values())

        def gradient(micro: MicroBatch) -> tuple[LossTerms, tuple[Tensor | None, ...]]:
            terms = loss_fn(TokenOutputs(**self._packed(micro)), token_data(batch, micro, weights))
            return terms, torch.autograd.grad(terms.loss, parameters, allow_unused=True)

        for terms, gradients in self._threads.map(gradient, self._micro_batches(batch)):
            self._threads.run_alone(_add_gradients, parameters, gradients)
            totals.add(terms)

    def _micro_batches(self, batch: Batch) -> Iterator[MicroBatch]:
        if self._fused is not None:
            return grouped_micro_batches(batch, self._settings.micro_batch_tokens, self._device)
        return micro_batches(
            batch, self._settings.micro_batch_tokens, self._device, self._threads.count
        )

    def _read(self, batch: Batch, name: Literal["logprobs", "values"]) -> FloatArray:
        @torch.no_grad()
        def read(micro: MicroBatch) -> tuple[MicroBatch, FloatArray]:
            values = (
                self._packed(micro)[name] if self._fused is None else self._fused.logprobs(micro)
            )
            return micro, values.float().cpu().numpy()

        result = np.zeros(batch.num_tokens, np.float32)
        with self._explain_out_of_memory():
            for micro, values in self._threads.map(read, self._micro_batches(batch)):
                result[micro.flat] = values
        return result

    # -- update

    def optimizer_step(self, lr: float, skip: bool = False) -> float:
        with self._explain_out_of_memory():
            return self._threads.run_alone(self._step, lr, skip)

    def _step(self, lr: float, skip: bool) -> float:
        norm = clip_gradients(list(self._parameters.values()), self._settings.max_grad_norm)
        if math.isfinite(norm) and not skip:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        self._optimizer.zero_grad()
        if self._fused is not None:
            self._fused.weights_changed()
        return norm if math.isfinite(norm) else math.nan

    # -- export, save and load

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._model.state_dict().items():
            yield name, tensor.detach()

    def save(self, folder: Path) -> None:
        layout, tensors = layout_of(self._tensors), self._tensors.values()
        to = folder / role_of(self._head)
        write_model(to, self._form, self._model.config, layout, (t.detach() for t in tensors))
        save_optimizer(folder, self._head, optimizer_state(self._optimizer, self._parameters))

    def load(self, folder: Path) -> None:
        files = TensorFiles.of_model(folder / role_of(self._head))
        load_training(
            folder,
            self._head,
            files,
            self._form,
            self._tensors,
            self._parameters,
            self._optimizer,
        )
        self._loaded()

    def _loaded(self) -> None:
        """Update what depends on the parameters after a load."""
        self._optimizer.zero_grad()
        if self._fused is not None:
            self._fused.weights_changed()

    def place(self, where: Literal["device", "host"]) -> Moved:
        if where == "host":
            return self._host_offload.offload(self._movable())
        self._claim_device()
        return self._host_offload.restore()

    def _claim_device(self) -> None:
        for other in self.colocated:
            if other.before_training is not None:
                other.before_training()

    def _movable(self) -> Iterable[Tensor]:
        yield from (p.grad for p in self._parameters.values() if p.grad is not None)
        yield from (tensor for state in self._optimizer.state.values() for tensor in state.values())
        if self._fused is not None:
            yield from self._packed.parameters()
            yield from () if self._shares_weights else self._fused.weights.named.values()
        elif not self._shares_weights:
            yield from self._packed.parameters()

    def _explain_out_of_memory(self) -> AbstractContextManager[None]:
        return explain_out_of_memory(self._device, self._settings, self._held)

    def _held(self) -> dict[str, int]:
        state = (tensor for state in self._optimizer.state.values() for tensor in state.values())
        copy = () if self._fused is None else self._fused.weights.named.values()
        held = {
            "parameters": _bytes(self._packed.parameters()),
            "bfloat16 copy of the parameters": _bytes(copy),
            "gradients": _bytes(p.grad for p in self._parameters.values() if p.grad is not None),
            "optimizer state": _bytes(state),
        }
        return held | {other.name: other.held() for other in self.colocated}


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _loss_of(loss_fn: LossFn, data: TokenData, outputs: TokenOutputs) -> LossTerms:
    return loss_fn(outputs, data)


def _thread_count(parameters: dict[str, nn.Parameter], device: torch.device) -> int:
    """Return the number of micro-batch threads: one per core on a CPU if the model is small.

    Each thread needs memory for a gradient, and the operations of a large model use all cores.
    """
    threads = torch.get_num_threads()
    small = threads * sum(p.numel() for p in parameters.values()) <= THREAD_PARAMETERS
    return threads if device.type == "cpu" and small else 1


def _add_gradients(parameters: list[nn.Parameter], gradients: tuple[Tensor | None, ...]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None and parameter.grad is None:
            parameter.grad = gradient
        elif gradient is not None and parameter.grad is not None:
            parameter.grad.add_(gradient)
