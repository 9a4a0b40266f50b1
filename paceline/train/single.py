"""The train engine of one device: a Hugging Face module, AdamW, packed micro-batches.

Parameters are only ever changed in place, so a rollout engine may read the very same ones.
"""

import logging
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.algo.loss import LossFn, LossTerms, TokenOutputs
from paceline.train.lanes import Lanes
from paceline.train.offload import HostShelf, Moved
from paceline.train.optimizer import adamw, clip_gradients, optimizer_state
from paceline.train.packed import Head, PackedModel, Tally
from paceline.train.packing import MicroBatch, micro_batches, token_data
from paceline.train.saved import MODEL_FILE, load_training, save_training
from paceline.train.settings import TrainSettings
from paceline.types import Batch, FloatArray

log = logging.getLogger(__name__)

LANE_PARAMETERS = 2**26  # in the gradients of all lanes together


class SingleDevice:
    """A TrainEngine. `head` says what the model is for: "policy" reads its output layer, "value" adds one of its own."""

    trained_file = MODEL_FILE  # where a checkpoint holds what is trained

    def __init__(self, model: PreTrainedModel, settings: TrainSettings, temperature: float = 1.0, head: Head = "policy") -> None:
        self._settings = settings
        self._packed = PackedModel(model, settings, temperature, head)
        self._model: PreTrainedModel = model
        self._device = next(model.parameters()).device
        self._parameters = self._trained_parameters() | self._packed.value_parameters()
        self._optimizer = adamw(self._parameters, settings)
        self._lanes = Lanes(_lane_count(self._parameters, self._device))
        self._shelf = HostShelf()
        self._lent = False

    @property
    def model(self) -> PreTrainedModel:
        return self._model

    def lend_model(self) -> PreTrainedModel:
        """The model, for somebody who reads its parameters at any time: from now on `place` leaves them where they are."""
        self._lent = True
        return self._model

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
        tally, weights = Tally(batch), loss_fn.weights(batch)
        parameters = list(self._parameters.values())

        def gradient(micro: MicroBatch) -> tuple[LossTerms, tuple[Tensor | None, ...]]:
            terms = loss_fn(TokenOutputs(**self._packed(micro)), token_data(batch, micro, weights))
            return terms, torch.autograd.grad(terms.loss, parameters, allow_unused=True)

        for terms, parts in self._lanes.map(gradient, self._micro_batches(batch)):
            self._lanes.alone(_add_gradient, parameters, parts)
            tally.add(terms)
        return tally.metrics()

    def _micro_batches(self, batch: Batch) -> Iterator[MicroBatch]:
        return micro_batches(batch, self._settings.micro_batch_tokens, self._device, self._lanes.count)

    def _read(self, batch: Batch, name: Literal["logprobs", "values"]) -> FloatArray:
        @torch.no_grad()
        def read(micro: MicroBatch) -> tuple[MicroBatch, FloatArray]:
            return micro, self._packed(micro)[name].float().cpu().numpy()

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
        save_training(folder, self.trained_file, self._parameters, optimizer_state(self._optimizer, self._parameters))
        self._model.config.save_pretrained(folder)

    def load(self, folder: Path) -> None:
        shapes = {name: tuple(p.shape) for name, p in self._parameters.items()}
        load_training(folder, self.trained_file, self._parameters, self._optimizer, shapes)
        self._optimizer.zero_grad()

    def place(self, where: Literal["device", "host"]) -> Moved:
        return self._shelf.bring_back() if where == "device" else self._shelf.put_away(self._movable())

    def _movable(self) -> Iterable[Tensor]:
        yield from (p.grad for p in self._parameters.values() if p.grad is not None)
        yield from (tensor for state in self._optimizer.state.values() for tensor in state.values())
        if not self._lent:
            yield from self._packed.parameters()


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
