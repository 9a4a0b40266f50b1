"""Policy training on one GPU in bfloat16 with the explicit passes of `decoder.py`.

The Hugging Face module keeps the float32 weights and gradients. The policy has a bfloat16 copy of
the weights, which a rollout engine on the same device can share. Unsupported models (adapters,
other decoders, other dtypes) train through the module itself, see `packed.py`.
"""

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.algo.loss import LossTerms, TokenOutputs
from paceline.errors import ModelError
from paceline.model.packing import MicroBatch
from paceline.model.support import trains_fast
from paceline.model.weights import DecoderWeights
from paceline.training.decoder import LayerPasses, TrainDecoder
from paceline.training.head import chunked_logprobs
from paceline.training.launches import LaunchLimit
from paceline.training.settings import TrainSettings


class FusedPolicy:
    def __init__(
        self, decoder: TrainDecoder, parameters: dict[str, nn.Parameter], temperature: float
    ) -> None:
        """`parameters` have the same names as the decoder's weights."""
        self.weights = decoder.weights
        self._parameters = parameters
        self._temperature = temperature
        self._decoder = decoder
        self._gradients: DecoderWeights | None = None

    def limit_launches(self) -> None:
        self._decoder.limit = LaunchLimit()

    @torch.no_grad()
    def logprobs(self, micro: MicroBatch) -> Tensor:
        hidden = self._decoder.forward(micro, self._decoder.start(micro), keep=False)
        return self._read(hidden, micro, None)[0]

    def add_gradient(
        self, micro: MicroBatch, loss: Callable[[TokenOutputs], LossTerms]
    ) -> LossTerms:
        """Add the gradient of the loss over one micro-batch to the parameters' gradients."""
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
        """Copy the parameters' new values to the bfloat16 weights and drop the gradients."""
        self.weights.load(dict(self._parameters))
        self._gradients = None

    def _read(
        self, hidden: Tensor, micro: MicroBatch, gradient: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return chunked_logprobs(
            hidden,
            self.weights.head,
            None,
            micro.targets,
            self._temperature,
            gradient=gradient,
            keep=not self._decoder.passes.recomputes,
        )

    def _open_gradients(self) -> DecoderWeights:
        """Return the parameters' `grad` tensors in the layout of the fused weights."""
        first = next(iter(self._parameters.values()))
        if self._gradients is None or first.grad is None:
            self._gradients = self.weights.zeros(torch.float32)
            for name, parameter in self._parameters.items():
                parameter.grad = self._gradients.named[name]
        return self._gradients


def fused_policy(
    model: PreTrainedModel,
    parameters: dict[str, nn.Parameter],
    settings: TrainSettings,
    temperature: float,
) -> FusedPolicy | None:
    """Return a FusedPolicy, or None if it does not support the model, the device or the dtype."""
    if not can_fuse(model, parameters, next(model.parameters()).device, settings):
        return None
    weights = DecoderWeights.from_module(model, share=False, dtype=torch.bfloat16)
    passes = LayerPasses(model.config, settings.gradient_checkpointing)
    return FusedPolicy(TrainDecoder(passes, weights), parameters, temperature or 1.0)


def can_fuse(
    model: PreTrainedModel,
    parameters: dict[str, nn.Parameter],
    device: torch.device,
    settings: TrainSettings,
) -> bool:
    """Return whether the explicit passes support this model, its parameters and the device."""
    if (
        device.type != "cuda"
        or settings.dtype != "bfloat16"
        or not trains_fast(model.config)
        or not importlib.util.find_spec("triton")
    ):
        return False
    try:
        with torch.device("meta"):
            weights = DecoderWeights.from_module(type(model)(model.config), share=False)
    except ModelError:
        return False  # a known model_type with a different layout
    return weights.named.keys() == parameters.keys()
