"""A policy trained on one GPU in bfloat16 by our own forward and backward pass; float32 weights, gradients and optimizer state stay the
Hugging Face module's. It has a bfloat16 copy of the weights, which a rollout engine on the same device may read as it is.

What it does not know (adapters, other decoders, other types) trains through the module itself, see `packed.py`.
"""

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.algo.loss import LossTerms, TokenOutputs
from paceline.errors import ModelError
from paceline.model.packing import MicroBatch
from paceline.model.shape import sliding_window
from paceline.model.support import check_fast
from paceline.model.weights import DecoderWeights
from paceline.train.decoder import LayerPasses, TrainDecoder
from paceline.train.head import chunked_logprobs
from paceline.train.settings import TrainSettings

DIMS = (16, 32, 64, 128, 256)  # of a head


class FusedPolicy:
    def __init__(
        self, decoder: TrainDecoder, parameters: dict[str, nn.Parameter], temperature: float
    ) -> None:
        """`parameters`: by the names that the decoder's weights have, too."""
        self.weights = decoder.weights
        self._parameters = parameters
        self._temperature = temperature
        self._decoder = decoder
        self._gradients: DecoderWeights | None = None

    @torch.no_grad()
    def logprobs(self, micro: MicroBatch) -> Tensor:
        hidden = self._decoder.forward(micro, self._decoder.start(micro), keep=False)
        return self._read(hidden, micro, None)[0]

    def add_gradient(
        self, micro: MicroBatch, loss: Callable[[TokenOutputs], LossTerms]
    ) -> LossTerms:
        """Add the gradient of the loss over one micro-batch to that of the parameters."""
        to = self._open_gradients()
        tape = self._decoder.start(micro)
        hidden = self._decoder.forward(micro, tape, keep=True).requires_grad_()
        logprobs, entropy = self._read(hidden, micro, to.head)
        terms = loss(TokenOutputs(logprobs=logprobs, entropy=entropy))
        (d_hidden,) = torch.autograd.grad(terms.loss, hidden, allow_unused=True)
        if d_hidden is not None:
            self._decoder.backward(micro, tape, d_hidden, to)
        return LossTerms(terms.loss.detach(), terms.sums, terms.maxima)

    def weights_changed(self) -> None:
        """The parameters have new values: bring the copy up to date. Their gradient, if there was one, is gone."""
        self.weights.load(dict(self._parameters))
        self._gradients = None

    def _read(
        self, hidden: Tensor, micro: MicroBatch, gradient: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return chunked_logprobs(
            hidden, self.weights.head, None, micro.targets, self._temperature, gradient=gradient
        )

    def _open_gradients(self) -> DecoderWeights:
        """Where gradients are added up: the parameters' own, in the layout of the fused weights."""
        first = next(iter(self._parameters.values()))
        if self._gradients is None or first.grad is None:
            self._gradients = self.weights.zeros(torch.float32)
            for name, parameter in self._parameters.items():
                parameter.grad = self._gradients.named[name]
        return self._gradients


def fused_policy(
    model: PreTrainedModel, parameters: dict[str, nn.Parameter], settings: TrainSettings, temperature: float
) -> FusedPolicy | None:  # fmt: skip
    """For a model and a device it can do, otherwise None."""
    if not can_fuse(model, parameters, next(model.parameters()).device, settings):
        return None
    weights = DecoderWeights.from_module(model, share=False, dtype=torch.bfloat16)
    return FusedPolicy(
        TrainDecoder(LayerPasses(model.config, settings.gradient_checkpointing), weights),
        parameters,
        temperature or 1.0,
    )


def can_fuse(
    model: PreTrainedModel,
    parameters: dict[str, nn.Parameter],
    device: torch.device,
    settings: TrainSettings,
) -> bool:
    """Does our own forward and backward pass know this decoder, with these weights to learn, on this device?"""
    if (
        device.type != "cuda"
        or settings.dtype != "bfloat16"
        or not importlib.util.find_spec("triton")
    ):
        return False
    try:
        check_fast(model.config)
        with torch.device("meta"):
            weights = DecoderWeights.from_module(type(model)(model.config), share=False)
    except ModelError:
        return False
    known = sliding_window(model.config) is None and weights.named.keys() == parameters.keys()
    return known and 2 * weights.inv_freq.numel() in DIMS
