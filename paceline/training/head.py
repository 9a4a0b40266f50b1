"""Heads that turn hidden states into log-probs and entropy (policy) or values (critic).

The logits of a batch (tokens x vocabulary) would be the largest tensor of training. They are
therefore computed only for trained positions, one chunk of rows at a time, and recomputed in the
backward pass. On a GPU with enough memory, the probabilities are kept in bfloat16 instead.
"""

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from paceline.algo.loss import TokenOutputs
from paceline.model.linear import product
from paceline.model.operations import matmul_float32

# Logits in memory at once: about the size of a CPU cache, or enough for large matmuls on a GPU.
CHUNK_LOGITS = {"cpu": 2**20, "cuda": 2**29}
CHUNK_ROWS = 128  # or more, also with a large vocabulary: every chunk reads the whole weight
HAS_TRITON = importlib.util.find_spec("triton") is not None
BLOCK = 4096  # logits that a GPU kernel program processes at a time


class ChunkedLogprobs(torch.autograd.Function):
    """Log-probs of the targets [M] and entropy [M]. The only chunk of a small batch is kept.

    Inputs: hidden [M, D], weight [V, D], bias [V] | None, targets [M]. The dtype of `hidden` is the
    compute dtype. The gradient of the weight has the weight's dtype, or is added to `gradient`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
        gradient: Tensor | None,
        cap: float | None,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropy = (
            torch.empty(len(hidden), dtype=dtype, device=hidden.device) for _ in range(2)
        )
        matrix = weight.to(hidden.dtype)
        ctx.kept = None
        for rows in chunks(len(hidden), chunk):
            log_p, slope = _log_softmax(hidden[rows], matrix, bias, temperature, cap)
            logprobs[rows] = log_p.gather(1, targets[rows, None]).squeeze(1)
            entropy[rows] = -(log_p.exp() * log_p).sum(-1)
            if len(hidden) <= chunk and any(ctx.needs_input_grad):
                ctx.kept = log_p, slope
        ctx.save_for_backward(hidden, weight, bias, targets, entropy)
        ctx.temperature, ctx.chunk, ctx.gradient, ctx.cap = temperature, chunk, gradient, cap
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropy = ctx.saved_tensors
        to_logprobs, to_entropy = upstream
        by_entropy = bool(to_entropy.any())  # entropy bonuses are rare: skip the work without one
        d_hidden = torch.empty_like(hidden)
        d_weight = ctx.gradient
        if d_weight is None and ctx.needs_input_grad[1]:  # skip frozen weights
            d_weight = torch.zeros_like(weight)
        d_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        matrix = weight.to(hidden.dtype)
        for rows in chunks(len(hidden), ctx.chunk):
            kept, ctx.kept = ctx.kept, None
            log_p, slope = kept or _log_softmax(
                hidden[rows], matrix, bias, ctx.temperature, ctx.cap
            )
            p = log_p.exp()
            d_logits = p * -to_logprobs[rows, None]
            d_logits.scatter_add_(1, targets[rows, None], to_logprobs[rows, None])
            if by_entropy:
                d_logits -= p * (log_p + entropy[rows, None]) * to_entropy[rows, None]
            d_logits /= ctx.temperature
            if slope is not None:
                d_logits *= slope
            if d_bias is not None:
                d_bias += d_logits.sum(0)
            d_logits = d_logits.to(hidden.dtype)
            d_hidden[rows] = product(d_logits, matrix)
            if d_weight is None:
                continue
            if d_weight.dtype == d_logits.dtype:
                d_weight.addmm_(d_logits.t(), hidden[rows])
            else:
                d_weight += matmul_float32(d_logits.t(), hidden[rows])
        returned = d_weight if ctx.gradient is None else None
        return d_hidden, returned, d_bias, None, None, None, None, None


class FusedLogprobs(torch.autograd.Function):
    """ChunkedLogprobs for bfloat16 on a GPU, without bias: one kernel per chunk and direction.

    The gradient of the weight is added to `gradient` if given. `keep` keeps the probabilities for
    the backward pass, rounded like the gradient that it computes from them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk: int,
        gradient: Tensor | None,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        from paceline.training import kernels

        logprobs, entropy, logs = (torch.empty(len(hidden), device=hidden.device) for _ in range(3))
        blocks = -(-len(weight) // BLOCK)
        peaks = torch.empty(len(hidden), blocks, device=hidden.device) if keep else logs
        ctx.kept = []
        matrix = weight.to(hidden.dtype)
        for rows in chunks(len(hidden), chunk):
            logits = matmul_float32(hidden[rows], matrix.t())
            kept = torch.empty_like(logits, dtype=hidden.dtype) if keep else logits
            kernels.read_logits[(len(logits),)](
                logits, targets[rows], logprobs[rows], entropy[rows], logs[rows], kept,
                peaks[rows], 1 / temperature,
                VOCABULARY=len(weight), BLOCK=BLOCK, KEEP=keep, num_warps=8,
            )  # fmt: skip
            ctx.kept += [kept] if keep else []
            del logits, kept  # free the chunk before the next one is allocated
        ctx.save_for_backward(hidden, weight, targets, logprobs, entropy, logs, peaks)
        ctx.temperature, ctx.chunk, ctx.gradient = temperature, chunk, gradient
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        from paceline.training import kernels

        hidden, weight, targets, logprobs, entropy, logs, peaks = ctx.saved_tensors
        to_logprobs = torch.zeros_like(logs) if upstream[0] is None else upstream[0].contiguous()
        to_entropy = None if upstream[1] is None else upstream[1].contiguous()
        d_hidden = torch.empty_like(hidden)
        d_weight = ctx.gradient
        if d_weight is None and ctx.needs_input_grad[1]:
            d_weight = torch.zeros_like(weight, dtype=torch.float32)
        matrix = weight.to(hidden.dtype)
        keep = bool(ctx.kept)
        for rows in chunks(len(hidden), ctx.chunk):
            logits = ctx.kept.pop(0) if keep else matmul_float32(hidden[rows], matrix.t())
            d_logits = logits if keep else torch.empty_like(logits, dtype=hidden.dtype)
            kernels.logits_backward[(len(logits), -(-len(weight) // BLOCK))](
                logits, peaks[rows], targets[rows], logprobs[rows], logs[rows], entropy[rows],
                to_logprobs[rows], logs if to_entropy is None else to_entropy[rows], d_logits,
                1 / ctx.temperature,
                VOCABULARY=len(weight), BLOCK=BLOCK, BY_ENTROPY=to_entropy is not None, KEPT=keep,
                num_warps=8,
            )  # fmt: skip
            del logits
            torch.mm(d_logits, matrix, out=d_hidden[rows])
            if d_weight is not None:
                torch.addmm(
                    d_weight, d_logits.t(), hidden[rows], out_dtype=torch.float32, out=d_weight
                )
        returned = None
        if ctx.gradient is None and d_weight is not None:
            returned = d_weight.to(weight.dtype)
        return d_hidden, returned, None, None, None, None, None


def chunk_rows(device: str, vocabulary: int) -> int:
    """Return the number of rows whose logits are in memory at once."""
    return max(CHUNK_ROWS, CHUNK_LOGITS.get(device, CHUNK_LOGITS["cpu"]) // vocabulary)


def chunks(count: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]


def _log_softmax(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, cap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Return log-softmax of the logits and, for capped logits, the derivative of the cap."""
    logits, slope = matmul_float32(hidden, weight.t()), None
    if bias is not None:
        logits += bias
    if cap is not None:
        logits = (logits / cap).tanh_()
        slope = 1 - logits.square()
        logits *= cap
    return torch.log_softmax(logits / temperature if temperature != 1.0 else logits, dim=-1), slope


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float = 1.0,
    chunk: int | None = None,
    gradient: Tensor | None = None,
    cap: float | None = None,
    keep: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each target at a temperature and the entropy of its distribution.

    With `gradient`, the weight's gradient is added to that tensor instead of the weight's `grad`.
    With `cap`, logits are soft-capped: cap * tanh(logits / cap). With `keep`, a backward pass on a
    GPU does not recompute the logits, at the cost of 2 bytes for each.
    """
    if chunk is None:
        chunk = chunk_rows(hidden.device.type, len(weight))
    on_gpu = hidden.is_cuda and hidden.dtype == torch.bfloat16 and HAS_TRITON
    if on_gpu and bias is None and cap is None:
        keep = keep and torch.is_grad_enabled() and hidden.requires_grad
        logprobs, entropy = FusedLogprobs.apply(
            hidden, weight, targets, temperature, chunk, gradient, keep
        )
        return logprobs, entropy
    logprobs, entropy = ChunkedLogprobs.apply(
        hidden, weight, bias, targets, temperature, chunk, gradient, cap
    )
    return logprobs, entropy


class PolicyHead(nn.Module):
    """The model's output layer, with its logit cap or factor, at the sampling temperature."""

    def __init__(
        self, output: nn.Linear, temperature: float, cap: float | None = None, factor: float = 1.0
    ) -> None:
        super().__init__()
        self.output = output
        self._temperature, self._cap = temperature / factor, cap

    def for_model(self, model: PreTrainedModel) -> "PolicyHead":
        """Return the same head on the output layer of a larger model."""
        output = model.get_output_embeddings()
        assert isinstance(output, nn.Linear), "a head was created for this architecture"
        return PolicyHead(output, self._temperature, self._cap)

    def forward(self, hidden: Tensor, targets: Tensor) -> TokenOutputs:
        logprobs, entropy = chunked_logprobs(
            hidden, self.output.weight, self.output.bias, targets, self._temperature, cap=self._cap
        )
        return TokenOutputs(logprobs=logprobs, entropy=entropy)


class ValueHead(nn.Module):
    """A value per position. Initial values are 0, so the first advantages equal the rewards."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def for_model(self, model: PreTrainedModel) -> "ValueHead":
        """Return a new head for a larger model with hidden states of the same size."""
        return ValueHead(self.linear.in_features).to(self.linear.weight.device)

    def forward(self, hidden: Tensor, targets: Tensor) -> TokenOutputs:
        return TokenOutputs(values=self.linear(hidden.to(self.linear.weight.dtype)).squeeze(-1))
