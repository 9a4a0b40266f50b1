"""Estimate of the training memory of each rank, from the model's configuration alone.

It is for planning, before a model is loaded. Parameters, gradients and optimizer state are exact
for the sharding of each backend (megatron: equal parts). Activations are an upper bound for one
full micro-batch.
"""

from collections import Counter

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from paceline.model.attention import SHORT_ROW
from paceline.model.shape import model_shape
from paceline.training.head import CHUNK_LOGITS
from paceline.training.settings import TrainSettings

FLOAT = 4  # bytes; all parameters are float32
# Layers that tensor parallelism splits by columns and by rows.
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWS = ("o_proj", "down_proj")


def memory_estimate(
    config: PretrainedConfig, settings: TrainSettings, ranks: int = 1
) -> dict[str, int]:
    """Return the bytes on the rank that holds the most, by purpose.

    "activations" is an upper bound; "gathered" are the weights and gradients that FSDP
    temporarily gathers.
    """
    with torch.device("meta"):  # named_parameters lists tied weights once
        parameters = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    tensor, pipeline = settings.tensor_parallel, settings.pipeline_parallel
    data = ranks // (tensor * pipeline)
    split = {name: _split(name, p, tensor) for name, p in parameters.items()}
    gathered = 0
    if settings.backend == "single":
        held = state = sum(_numel(shape) for shape in split.values())
    elif settings.backend == "fsdp":
        held = state = sum(-(-shape[0] // data) * _numel(shape[1:]) for shape in split.values())
        layers, root = Counter[str](), 0
        for name, shape in split.items():
            layer = next((part for part in name.split(".") if part.isdigit()), None)
            if layer is None:
                root += _numel(shape)
            else:
                layers[layer] += _numel(shape)
        # Weights and gradients of the current layer and of the prefetched one.
        gathered = 2 * (root + 2 * max(layers.values())) * FLOAT
        if data == 1:  # a single rank keeps its weights gathered until the last pass
            weights = held * (2 if settings.dtype == "bfloat16" else FLOAT)
            gathered = weights + 2 * max(root, *layers.values()) * FLOAT
    else:
        held = -(-sum(p.numel() for p in parameters.values()) // (tensor * pipeline))
        state = -(-held // data)
    # See fused.py: training on one GPU in bfloat16 keeps a bfloat16 copy of the weights.
    copied = (
        settings.backend == "single" and settings.dtype == "bfloat16" and torch.cuda.is_available()
    )
    return {
        "parameters": held * (FLOAT + 2 * copied),
        "gradients": held * FLOAT,
        "optimizer": 2 * state * FLOAT,
        "activations": activation_bound(config, settings),
        "gathered": gathered,
    }


def activation_bound(config: PretrainedConfig, settings: TrainSettings) -> int:
    """Return the bytes of one micro-batch's saved activations and of the output layer."""
    shape, tokens = model_shape(config), settings.micro_batch_tokens
    hidden, query, key = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # In float32: two norms of about four tensors each, and the residual twice. In the compute
    # dtype: queries, keys and values before and after rotation and unpacking, the attention output
    # twice, five MLP tensors, and on a CPU the attention scores of rows of up to SHORT_ROW tokens.
    itemsize = 2 if settings.dtype == "bfloat16" else FLOAT
    split = 8 * (query + 2 * key) + 2 * query + 5 * shape.mlp
    split += 0 if torch.cuda.is_available() else 3 * SHORT_ROW * shape.heads
    layer = 10 * hidden * FLOAT + split * itemsize // settings.tensor_parallel
    layers = -(-shape.layers // settings.pipeline_parallel)
    kept = layers * hidden * FLOAT + layer if settings.gradient_checkpointing else layers * layer
    chunk = CHUNK_LOGITS["cuda" if torch.cuda.is_available() else "cpu"]
    logits = 3 * min(chunk, tokens * shape.vocabulary)
    return tokens * (kept + 8 * hidden * FLOAT) + logits * FLOAT


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _split(name: str, parameter: nn.Parameter, ranks: int) -> tuple[int, ...]:
    """Return the shape of one tensor-parallel rank's part under FSDP.

    Vectors and embeddings are replicated.
    """
    shape = list(parameter.shape)
    owner = name.rsplit(".", 1)[0]
    if ranks > 1 and owner.endswith(COLUMNS):
        shape[0] = -(-shape[0] // ranks)
    elif ranks > 1 and owner.endswith(ROWS) and len(shape) > 1:
        shape[1] = -(-shape[1] // ranks)
    return tuple(shape)
