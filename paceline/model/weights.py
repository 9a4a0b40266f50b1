"""The weights of a decoder in the layout of the native engine: q/k/v and gate/up are fused.

Nothing is derived from the weights ahead of time, so an in-place update leaves nothing stale; only
`packed` makes a copy, which its caller drops when weights change. With
`share` the module's parameters become views of the fused storage: an optimizer that updates them in
place updates the engine too.
"""

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.errors import ModelError, SyncError
from paceline.model.fp8 import dequantized, quantize
from paceline.model.linear import TrainedLinear, linear, pack, packs, uses_onednn
from paceline.model.shape import head_dim
from paceline.model.support import ALTERNATIVE, check_fast


class EngineWeights(Protocol):
    """The weights of an engine, without the layout that only its backend knows."""

    @property
    def named(self) -> dict[str, Tensor]: ...
    @property
    def vocabulary(self) -> int: ...

    def load(self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        """Copy all new values in, or raise SyncError if a name or a shape is wrong.

        Then nothing is copied, unless `tensors` is an iterator, whose error is known at its end.
        """
        ...


@dataclass(frozen=True, slots=True)
class Linear:
    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None = None  # factor of each output, if the weight is FP8

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self._matrix(x.dtype), self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Compute residual += self(x), in most cases without a temporary result."""
        matrix = self._matrix(x.dtype)
        if uses_onednn(x, matrix):
            residual.add_(linear(x, matrix, self.bias))
            return
        residual.addmm_(x, matrix.t())
        if self.bias is not None:
            residual.add_(self.bias)

    def packed(self) -> "Linear":
        return self if self.scale is not None else replace(self, weight=pack(self.weight))

    def _matrix(self, dtype: torch.dtype) -> Tensor:
        return self.weight if self.scale is None else dequantized(self.weight, self.scale, dtype)


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.out, self.gate_up, self.down

    def packed(self) -> "Layer":
        qkv, out, gate_up, down = (each.packed() for each in self.linears)
        return replace(self, qkv=qkv, out=out, gate_up=gate_up, down=down)


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor
    inv_freq: Tensor  # rotary frequencies, as the model computes them
    rope_scale: float  # factor on cos and sin
    named: dict[str, Tensor] = field(repr=False)  # by Hugging Face name: the same memory as above
    scales: dict[str, Tensor] = field(default_factory=dict, repr=False)  # of the FP8 weights

    @classmethod
    def from_module(
        cls, model: PreTrainedModel, share: bool, dtype: torch.dtype | None = None
    ) -> "DecoderWeights":
        """Read the weights of a module.

        `share`: turn the q/k/v and gate/up parameters into views of one storage (the Parameter
        objects stay) and read all others where they are; from then on parameters may only be
        changed in place. Otherwise copy them, in `dtype` if one is given.
        """
        check_fast(model.config)
        body: Any = model.model
        named: dict[str, Tensor] = {}
        take = _WeightReader(model, share, None if share else dtype, named)
        layers = tuple(
            take.layer(f"model.layers.{i}", layer) for i, layer in enumerate(body.layers)
        )
        embedding = take.single("model.embed_tokens.weight")
        tied = model.lm_head.weight is body.embed_tokens.weight
        head = embedding if tied else take.single("lm_head.weight")
        norm = take.single("model.norm.weight")
        unknown = sorted(set(dict(model.named_parameters())) - set(named))
        if unknown:
            raise ModelError(
                f"{model.config.model_type}: the native engine does not support the parameters "
                f"{unknown[:4]}; {ALTERNATIVE}"
            )
        rotary = body.rotary_emb
        if 2 * rotary.inv_freq.numel() != head_dim(model.config):
            raise ModelError(
                f"{model.config.model_type}: the native engine does not support partial rotary "
                f"embeddings; {ALTERNATIVE}"
            )
        return cls(
            embedding,
            layers,
            norm,
            head,
            rotary.inv_freq.float(),
            float(rotary.attention_scaling),
            named,
        )

    @property
    def vocabulary(self) -> int:
        return len(self.embedding)

    def packed(self) -> "DecoderWeights":
        """Return weights for decoding, with copies of large matrices in a faster layout."""
        matrices = [each.weight for layer in self.layers for each in layer.linears]
        if not packs(sum(each.nbytes for each in (*matrices, self.head))):
            return self
        layers = tuple(layer.packed() for layer in self.layers)
        return replace(self, layers=layers, head=pack(self.head))

    def load(self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        also = {"lm_head.weight"} if self.head is self.embedding else set[str]()
        load_by_name(self.named, tensors, also, scales=self.scales)

    def zeros(self, dtype: torch.dtype) -> "DecoderWeights":
        """Return zeros that are fused and tied in the same way."""
        made: dict[int, Tensor] = {}

        def like(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in made:
                made[storage.data_ptr()] = torch.zeros(
                    storage.nbytes() // tensor.element_size(), dtype=dtype, device=tensor.device
                )
            return made[storage.data_ptr()].as_strided(
                tensor.shape, tensor.stride(), tensor.storage_offset()
            )

        def linear(one: Linear) -> Linear:
            return Linear(like(one.weight), None if one.bias is None else like(one.bias))

        def layer(one: Layer) -> Layer:
            return Layer(
                input_norm=like(one.input_norm),
                qkv=linear(one.qkv),
                q_norm=None if one.q_norm is None else like(one.q_norm),
                k_norm=None if one.k_norm is None else like(one.k_norm),
                out=linear(one.out),
                mlp_norm=like(one.mlp_norm),
                gate_up=linear(one.gate_up),
                down=linear(one.down),
            )

        layers = tuple(map(layer, self.layers))
        named = {name: like(tensor) for name, tensor in self.named.items()}
        return DecoderWeights(
            like(self.embedding),
            layers,
            like(self.norm),
            like(self.head),
            self.inv_freq,
            self.rope_scale,
            named,
        )


def load_by_name(
    named: dict[str, Tensor],
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    also: AbstractSet[str],
    optional: Mapping[str, Tensor] | None = None,
    scales: Mapping[str, Tensor] | None = None,
) -> None:
    """Copy new values into all of `named`, or raise SyncError if a name or a shape is wrong.

    Then nothing is copied, except from an iterator: its error is known only at its end, after the
    valid tensors are copied. Of an iterator and of a mapping, one tensor is held at a time.
    `also`: names that may be present and are ignored, such as the second name of a tied weight.
    Tensors in `optional` are copied if they are present. Weights with an entry in `scales` are FP8
    and quantized.
    """
    scales = scales or {}
    if isinstance(tensors, Iterator):
        _stream_by_name(named, tensors, also, optional or {}, scales)
        return
    incoming = tensors if isinstance(tensors, Mapping) else dict(tensors)
    targets = named | {
        name: tensor for name, tensor in (optional or {}).items() if name in incoming
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in targets.items()}
    check_weights({name: tuple(incoming[name].shape) for name in incoming}, shapes, also)
    with torch.no_grad():
        if isinstance(tensors, dict) and next(iter(named.values())).is_cuda:
            # One launch: each copy alone would finish before the next could start.
            plain = {name: target for name, target in targets.items() if name not in scales}
            torch._foreach_copy_(list(plain.values()), [incoming[name] for name in plain])
            targets = {name: targets[name] for name in scales}
        for name, target in targets.items():
            _store(incoming[name], target, scales.get(name))


def _stream_by_name(
    named: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, Tensor]],
    also: AbstractSet[str],
    optional: Mapping[str, Tensor],
    scales: Mapping[str, Tensor],
) -> None:
    """Copy values as they arrive, so that one tensor is held at a time."""
    arrived: dict[str, tuple[int, ...]] = {}
    with torch.no_grad():
        for name, tensor in tensors:
            arrived[name] = tuple(tensor.shape)
            target = named.get(name, optional.get(name))
            if target is not None and target.shape == tensor.shape:
                _store(tensor, target, scales.get(name))
    check_weights(arrived, {name: tuple(t.shape) for name, t in named.items()}, {*also, *optional})


def _store(tensor: Tensor, target: Tensor, scale: Tensor | None) -> None:
    if scale is None:
        target.copy_(tensor)
    else:
        quantize(tensor, target, scale)


def check_weights(
    incoming: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    also: AbstractSet[str] = frozenset(),
) -> None:
    """Raise SyncError if names or shapes of new weights are not the expected ones."""
    missing = sorted(expected.keys() - incoming.keys())
    unknown = sorted(incoming.keys() - expected.keys() - also)
    if missing or unknown:
        raise SyncError(
            f"new weights: {len(missing)} missing {missing[:4]}, {len(unknown)} unknown "
            f"{unknown[:4]}; expected all weights of the model"
        )
    for name, shape in expected.items():
        if incoming[name] != shape:
            raise SyncError(
                f"new weights: {name} has shape {incoming[name]}, the model has {shape}"
            )


class _WeightReader:
    """Reads tensors from a module, fuses some, and records each under its name."""

    def __init__(
        self,
        model: PreTrainedModel,
        share: bool,
        dtype: torch.dtype | None,
        named: dict[str, Tensor],
    ) -> None:
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.share = share
        self.dtype = dtype
        self.named = named

    def single(self, name: str) -> Tensor:
        tensor = self.parameters[name].detach()
        self.named[name] = (
            tensor if self.share else tensor.to(self.dtype or tensor.dtype, copy=True)
        )
        return self.named[name]

    def optional(self, name: str) -> Tensor | None:
        return self.single(name) if name in self.parameters else None

    def fused(self, names: list[str]) -> Tensor:
        """Return one tensor that concatenates these along the first dimension."""
        storage = torch.cat([self.parameters[name].detach() for name in names])
        storage = storage.to(self.dtype or storage.dtype)
        for name, view in zip(
            names, storage.split([len(self.parameters[name]) for name in names]), strict=True
        ):
            self.named[name] = view
            if self.share:
                self.parameters[name].data = view
        return storage

    def linear(self, *names: str) -> Linear:
        biases = [f"{name}.bias" for name in names if f"{name}.bias" in self.parameters]
        weights = [f"{name}.weight" for name in names]
        if len(names) == 1:
            return Linear(self.single(weights[0]), self.single(biases[0]) if biases else None)
        return Linear(self.fused(weights), self.fused(biases) if biases else None)

    def layer(self, prefix: str, module: nn.Module) -> Layer:
        for name, part in module.named_modules():
            if name.endswith("_proj") and type(part) not in (nn.Linear, TrainedLinear):
                raise ModelError(
                    f"{prefix}.{name} is a {type(part).__name__}; the native engine needs plain "
                    "Linear layers: merge adapters first"
                )
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return Layer(
            input_norm=self.single(f"{prefix}.input_layernorm.weight"),
            qkv=self.linear(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
            q_norm=self.optional(f"{attention}.q_norm.weight"),
            k_norm=self.optional(f"{attention}.k_norm.weight"),
            out=self.linear(f"{attention}.o_proj"),
            mlp_norm=self.single(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=self.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            down=self.linear(f"{mlp}.down_proj"),
        )
