"""Decoder of Megatron's parallel layers, equivalent to the Hugging Face model of the same config.

Megatron provides layers split over tensor-parallel ranks and pipeline stages. This module replaces
the parts for which Megatron needs Transformer Engine: packed rows (the same micro-batches as on one
device), norms with sequence parallelism, and the head.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from paceline.algo.loss import TokenOutputs
from paceline.errors import ConfigError, ModelError
from paceline.model.attention import packed_attention
from paceline.model.packing import MicroBatch, RowLayout
from paceline.model.shape import head_dim
from paceline.training.head import ValueHead, chunk_rows
from paceline.training.megatron.head import vocabulary_parallel_logprobs
from paceline.training.megatron.weights import padded_vocabulary
from paceline.training.packed import Head
from paceline.training.settings import TrainSettings

FAST = ("llama", "qwen2", "qwen3")


def transformer_config(
    config: PretrainedConfig, settings: TrainSettings, sequence_parallel: bool
) -> TransformerConfig:
    tensor, pipeline = settings.tensor_parallel, settings.pipeline_parallel
    _check_supported(config)
    _check_divisible(config, tensor, pipeline)
    recompute = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_dim(config),
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2",
        qk_layernorm=config.model_type == "qwen3",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        sequence_parallel=sequence_parallel,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        autocast_dtype=getattr(torch, settings.dtype),
        use_cpu_initialization=True,
        perform_initialization=False,  # the caller loads the weights
        # Sum the gradients of micro-batches and ranks: loss weights refer to the whole batch.
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,  # needs Apex
        bias_activation_fusion=torch.cuda.is_available(),
        batch_p2p_comm=False,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # required by variable lengths, also without experts
        **(recompute if settings.gradient_checkpointing else {}),
    )


def _check_supported(config: PretrainedConfig) -> None:
    wrong = [
        (config.model_type not in FAST, f"is a {config.model_type}"),
        (
            getattr(config, "attention_bias", False) and config.model_type != "qwen2",
            "has attention biases",
        ),
        (getattr(config, "mlp_bias", False), "has MLP biases"),
        (
            getattr(config, "hidden_act", "silu") != "silu",
            f"uses {getattr(config, 'hidden_act', None)}",
        ),
        (
            set(getattr(config, "layer_types", None) or ()) - {"full_attention"},
            "has layers without full attention",
        ),
    ]
    for is_wrong, problem in wrong:
        if is_wrong:
            raise ModelError(
                f"the model {problem}; train.backend = 'megatron' supports standard "
                f"{', '.join(FAST)}. Use 'fsdp' instead"
            )


def _check_divisible(config: PretrainedConfig, tensor: int, pipeline: int) -> None:
    for name, count, ranks, setting in (
        ("num_key_value_heads", config.num_key_value_heads, tensor, "tensor_parallel"),
        ("intermediate_size", config.intermediate_size, tensor, "tensor_parallel"),
        ("num_hidden_layers", config.num_hidden_layers, pipeline, "pipeline_parallel"),
    ):
        if count % ranks:
            raise ConfigError(
                f"train.{setting} = {ranks} does not divide the model's {name} = {count}; use a "
                "divisor"
            )


class RmsNorm(nn.Module):
    """RMS norm for sequence parallelism, which Megatron supports only with Transformer Engine."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        # Megatron sums the gradients of parameters that have this attribute over ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._eps, self._dtype = eps, config.autocast_dtype

    def forward(self, x: Tensor) -> Tensor:
        """Normalize in float32 and return the compute dtype.

        Megatron's linear layers exchange their inputs between ranks in the dtype they get.
        """
        x = x.float()
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps)
        return (self.weight * normed).to(self._dtype)


def add_residual(training: bool, fused: bool) -> Callable[..., Tensor]:
    """Return an addition that keeps the residual stream float32, as on one device.

    Megatron's function would round it to the dtype of the addend.
    """
    return lambda x_and_bias, residual, dropout: residual + x_and_bias[0]


class PackedAttention(nn.Module):
    """Replacement for Megatron's core attention over packed rows; `mask` encodes their layout."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **_: Any) -> Tensor:
        # [T, 1, heads, size] -> [1, heads, T, size]
        q, k, v = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        out = packed_attention(self, q, k, v, None, row_layout=layout_of(mask, len(query)))[0]
        return out.transpose(0, 1).flatten(2)


def mask_of(layout: RowLayout) -> Tensor:
    """Encode a layout as [2, rows, longest]: `spread`, and `slots` padded.

    One tensor, because activation recomputation passes no other argument through.
    """
    slots = F.pad(layout.slots, (0, layout.rows * layout.longest - len(layout.slots)))
    return torch.stack([layout.spread, slots]).view(2, layout.rows, layout.longest)


def layout_of(mask: Tensor, tokens: int) -> RowLayout:
    _, rows, longest = mask.shape
    spread, slots = mask.flatten(1)
    # Padding for sequence parallelism can exceed the rectangle. The attention of its tokens is
    # arbitrary, because their outputs are not used.
    return RowLayout(rows, longest, spread, F.pad(slots, (0, tokens - len(slots))))


class Decoder(GPTModel):  # type: ignore[misc]
    """One pipeline stage. It returns hidden states; the last stage returns the head's outputs."""

    def __init__(
        self,
        parallel: TransformerConfig,
        config: PretrainedConfig,
        temperature: float,
        head: Head,
    ) -> None:
        spec = get_gpt_layer_local_spec(qk_layernorm=parallel.qk_layernorm, normalization="RMSNorm")
        attention = spec.submodules.self_attention.submodules
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RmsNorm
        spec.submodules.self_attn_bda = spec.submodules.mlp_bda = add_residual
        attention.core_attention = PackedAttention
        if parallel.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RmsNorm
        layers = parallel.num_layers // parallel.pipeline_model_parallel_size
        ranks = parallel.tensor_model_parallel_size
        super().__init__(
            parallel,
            TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=RmsNorm),
            vocab_size=padded_vocabulary(config.vocab_size, ranks),
            max_sequence_length=config.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=head == "policy" and config.tie_word_embeddings,
            # `forward` computes the rotary angles, because positions restart at every row.
            position_embedding_type="none",
        )
        if head == "value" and self.post_process:
            del self.output_layer
            self.value_head = ValueHead(config.hidden_size)
        self.register_buffer("_rotary", _rotary(config), persistent=False)
        self._temperature = temperature
        self._shard = self.vocab_size // ranks
        self._first = self._shard * parallel_state.get_tensor_model_parallel_rank()
        self._valid = min(self._shard, config.vocab_size - self._first)

    def use_autocast(self, device: torch.device) -> None:
        """Enable autocast for each layer, so that recomputation uses it too.

        The residual stream between layers stays float32.
        """
        for layer in self.decoder.layers:
            layer.forward = torch.autocast(device.type, dtype=self.config.autocast_dtype)(
                layer.forward
            )

    def forward(self, micro: MicroBatch) -> Tensor | TokenOutputs:
        ranks = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        padding = (0, -micro.input_ids.shape[1] % ranks)
        hidden = self.embedding(F.pad(micro.input_ids, padding), None) if self.pre_process else None
        angles = F.pad(micro.position_ids[0], padding)[:, None].float() * self._rotary
        hidden = self.decoder(
            hidden_states=hidden,
            attention_mask=mask_of(micro.layout),
            rotary_pos_emb=torch.cat([angles, angles], -1)[:, None, None, :],
        )
        return self._head(hidden, micro) if self.post_process else hidden

    def _head(self, hidden: Tensor, micro: MicroBatch) -> TokenOutputs:
        """Compute log-probs or values of the trained tokens, whose hidden states every rank gets.

        The ranks of a policy each process their part of the vocabulary, so their gradients of the
        hidden states must be summed. A critic's ranks have equal gradients.
        """
        split = not hasattr(self, "value_head")
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=split)
        elif split:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        hidden = hidden[:, 0].index_select(0, micro.predict)
        if not split:
            return self.value_head(hidden, micro.targets)
        weight = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        logprobs, entropy = vocabulary_parallel_logprobs(
            hidden.to(self.config.autocast_dtype),
            weight[: self._valid],
            micro.targets,
            self._first,
            self._temperature,
            parallel_state.get_tensor_model_parallel_group(),
            chunk_rows(hidden.device.type, self._shard),
        )
        return TokenOutputs(logprobs=logprobs, entropy=entropy)


def _rotary(config: PretrainedConfig) -> Tensor:
    """Return Hugging Face's rotary frequencies, which must not depend on the sequence length."""
    module = LlamaRotaryEmbedding(config)
    if (
        module.attention_scaling != 1.0
        or "dynamic" in module.rope_type
        or module.rope_type == "longrope"
    ):
        raise ModelError(
            f"train.backend = 'megatron' does not support rope_type = {module.rope_type!r}; use "
            "'fsdp' instead"
        )
    return module.inv_freq
