"""The weights of a decoder as the native engine reads them: q/k/v and gate/up fused, everything else as Hugging Face has it.

Nothing is derived from the weights ahead of time, so after an in-place update there is nothing stale. With `share` the
module's own parameters become views of the fused storage: an optimizer that updates in place updates the engine too.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from paceline.errors import ModelError, SyncError

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")  # by our own forward pass
ELSE = "rollout.engine = 'vllm' may be able to generate with it"
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
CHANGING_ROPE = ("dynamic", "longrope")  # with the length of the longest sequence of a forward pass
ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")


class EngineWeights(Protocol):
    """What everybody but a backend needs to know of an engine's weights."""

    @property
    def named(self) -> dict[str, Tensor]: ...
    @property
    def vocabulary(self) -> int: ...

    def load(self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        """Copy new values in: all of them, or none if a name or a shape is wrong (SyncError)."""
        ...


@dataclass(frozen=True, slots=True)
class Linear:
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """residual += self(x), without a tensor in between."""
        residual.addmm_(x, self.weight.t())
        if self.bias is not None:
            residual.add_(self.bias)


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


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor
    inv_freq: Tensor  # rotary frequencies, as the model computes them
    rope_scale: float  # factor on cos and sin
    named: dict[str, Tensor] = field(repr=False)  # by Hugging Face name: the same memory as above

    @classmethod
    def from_module(
        cls, model: PreTrainedModel, share: bool, dtype: torch.dtype | None = None
    ) -> "DecoderWeights":
        """`share`: re-point the module's q/k/v and gate/up parameters to views of one storage (the Parameter objects stay)
        and read all others where they are. After that the parameters may only be changed in place. Otherwise: a copy, in
        `dtype` if one is given, as when the trainer keeps float32 and generation is to be fast."""
        check_supported(model.config)
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
                f"{model.config.model_type}: the native engine does not know the parameters {unknown[:4]}; {ELSE}"
            )
        rotary = body.rotary_emb
        if 2 * rotary.inv_freq.numel() != head_dim(model.config):
            raise ModelError(
                f"{model.config.model_type}: heads rotated only in part are not supported by the native engine; {ELSE}"
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

    def load(self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        load_by_name(
            self.named, tensors, {"lm_head.weight"} if self.head is self.embedding else set()
        )

    def zeros(self, dtype: torch.dtype) -> "DecoderWeights":
        """The same tensors, fused and tied in the same way, all 0."""
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
                like(one.input_norm), linear(one.qkv), None if one.q_norm is None else like(one.q_norm),
                None if one.k_norm is None else like(one.k_norm), linear(one.out), like(one.mlp_norm), linear(one.gate_up),
                linear(one.down),
            )  # fmt: skip

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
) -> None:
    """Copy new values in: all of `named`, or none if a name or a shape is wrong; of a mapping one tensor at a time is held.
    `also`: names that may come besides, such as the second ones of tied weights; what is in `optional` is taken if it comes."""
    incoming = tensors if isinstance(tensors, Mapping) else dict(tensors)
    missing, unknown = (
        sorted(named.keys() - incoming.keys()),
        sorted(incoming.keys() - named.keys() - also),
    )
    if missing or unknown:
        raise SyncError(
            f"new weights: {len(missing)} missing {missing[:4]}, {len(unknown)} unknown {unknown[:4]}; send all of the model's"
        )
    targets = named | {
        name: tensor for name, tensor in (optional or {}).items() if name in incoming
    }
    for name, target in targets.items():
        if (shape := incoming[name].shape) != target.shape:
            raise SyncError(
                f"new weights: {name} has shape {tuple(shape)}, the model has {tuple(target.shape)}"
            )
    with torch.no_grad():
        if isinstance(tensors, dict) and next(iter(named.values())).is_cuda:
            # all at once, since each copy alone is over before the next can be started
            torch._foreach_copy_(list(targets.values()), [incoming[name] for name in targets])
            return
        for name, target in targets.items():
            target.copy_(incoming[name])


class _WeightReader:
    """Reads tensors out of a module, fusing some, and notes under which name each is found."""

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
        """One tensor holding all of these, one after the other along the first dimension."""
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
            if name.endswith("_proj") and type(part) is not nn.Linear:
                raise ModelError(
                    f"{prefix}.{name} is a {type(part).__name__}; the native engine needs plain Linear layers: merge adapters first"
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


def head_dim(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def sliding_window(config: PretrainedConfig) -> int | None:
    """How far a token sees, where that is limited at all."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and "sliding_attention" not in layer_types:
        return None
    return getattr(config, "sliding_window", None)


def check_supported(config: PretrainedConfig) -> None:
    """Raises ModelError for what our own forward pass does not know."""
    if config.model_type not in SUPPORTED:
        raise ModelError(f"model_type {config.model_type!r} is not one of {', '.join(SUPPORTED)}")
    if config.hidden_act != "silu":
        raise ModelError(f"hidden_act {config.hidden_act!r} is not 'silu'")
    rope = config.rope_parameters["rope_type"]
    if rope not in STATIC_ROPE:
        raise ModelError(f"rope_type {rope!r} is not one of {', '.join(STATIC_ROPE)}")


def check_generates(config: PretrainedConfig, max_length: int) -> None:
    """Raises ModelError for a model, or sequences of a length, that the native engine cannot generate with at all."""
    kind, text = config.model_type, config.get_text_config()
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model is None or config.is_encoder_decoder:
        raise ModelError(
            f"model_type {kind!r} is no causal language model: give a decoder that makes text from text"
        )
    other = sorted(set(getattr(text, "layer_types", None) or ()) - set(ATTENTION))
    if other or getattr(model, "_is_stateful", False):
        raise ModelError(
            f"model_type {kind!r} remembers more than keys and values ({', '.join(other) or 'a state'}), which the native engine cannot "
            f"keep; {ELSE}, or take a model with attention alone"
        )
    reach = rope_reach(text)
    if reach is not None and max_length > reach:
        raise ModelError(
            f"the positions of model_type {kind!r} mean something else as soon as a sequence of the batch is longer than {reach} tokens: "
            f"keep data.max_prompt_length + rollout.max_response_length, {max_length} now, within that; {ELSE}"
        )


def rope_reach(text: PretrainedConfig) -> int | None:
    """Up to which length rotary frequencies stay the same, where they change with it."""
    rope = getattr(text, "rope_parameters", None) or {}
    parts = (
        [rope]
        if "rope_type" in rope
        else [part for part in rope.values() if isinstance(part, dict)]
    )  # by kind of layer
    reaches = [
        part.get("original_max_position_embeddings") or text.max_position_embeddings
        for part in parts
        if part.get("rope_type") in CHANGING_ROPE
    ]
    return min(reaches, default=None)


def position_limit(config: PretrainedConfig) -> int | None:
    """Where positions end, in models that keep a table of them instead of turning by an angle."""
    text = config.get_text_config()
    return (
        None
        if getattr(text, "rope_parameters", None)
        else getattr(text, "max_position_embeddings", None)
    )


def is_fast(config: PretrainedConfig, max_length: int) -> bool:
    """Can our own forward pass generate sequences of this length?"""
    try:
        check_supported(config)
    except ModelError:
        return False
    window = sliding_window(config)
    return window is None or max_length <= window
