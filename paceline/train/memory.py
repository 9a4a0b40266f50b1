"""How much memory training takes on each rank, from a model's configuration alone: for planning, before anything is loaded.

Parameters, gradients and optimizer state are counted exactly as the back ends shard them (megatron: in equal parts). Activations are
an upper bound for one micro-batch of rows that fill it.
"""

from collections import Counter

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from paceline.model.attention import SHORT_ROW
from paceline.model.shape import model_shape
from paceline.train.head import CHUNK_LOGITS
from paceline.train.settings import TrainSettings

FLOAT = 4  # bytes; everything that is learned is float32
COLUMNS, ROWS = (
    ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
    ("o_proj", "down_proj"),
)  # how tensor parallel splits layers


def memory_estimate(
    config: PretrainedConfig, settings: TrainSettings, ranks: int = 1
) -> dict[str, int]:
    """Bytes on the rank that holds the most: parameters, gradients, optimizer, activations (at most), and gathered: what FSDP has whole
    for a moment."""
    with torch.device("meta"):
        parameters = dict(
            AutoModelForCausalLM.from_config(config).named_parameters()
        )  # tied ones once
    tensor, pipeline = settings.tensor_parallel, settings.pipeline_parallel
    data = ranks // (tensor * pipeline)
    split = {
        name: _split(name, p, tensor) for name, p in parameters.items()
    }  # what one tensor-parallel rank has of it
    gathered = 0
    if settings.backend == "single":
        held = state = sum(_numel(shape) for shape in split.values())
    elif settings.backend == "fsdp":
        held = state = sum(-(-shape[0] // data) * _numel(shape[1:]) for shape in split.values())
        layers, root = Counter[str](), 0
        for name, shape in split.items():
            number = next(
                (part for part in name.split(".") if part.isdigit()), None
            )  # of the layer it is in
            if number is None:
                root += _numel(shape)
            else:
                layers[number] += _numel(shape)
        gathered = (
            2 * (root + 2 * max(layers.values())) * FLOAT
        )  # weights and gradients, of a layer and the one fetched ahead
        if data == 1:  # one rank keeps its weights whole until the last pass
            gathered = (
                held * (2 if settings.dtype == "bfloat16" else FLOAT)
                + 2 * max(root, *layers.values()) * FLOAT
            )
    else:
        held = -(-sum(p.numel() for p in parameters.values()) // (tensor * pipeline))
        state = -(-held // data)
    copied = (
        settings.backend == "single" and settings.dtype == "bfloat16" and torch.cuda.is_available()
    )  # see fused.py
    return {
        "parameters": held * (FLOAT + 2 * copied),
        "gradients": held * FLOAT,
        "optimizer": 2 * state * FLOAT,
        "activations": activation_bound(config, settings),
        "gathered": gathered,
    }


def activation_bound(config: PretrainedConfig, settings: TrainSettings) -> int:
    """Bytes kept from forward to backward for one micro-batch, and what the output layer needs at once."""
    shape, tokens = model_shape(config), settings.micro_batch_tokens
    hidden, query, key = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # In float32: two norms of about four tensors each, and the residual twice. In the type of the products: queries, keys and values
    # before and after rotation and unpacking, the output of attention twice, five tensors of the MLP, and on a CPU, where rows of
    # up to SHORT_ROW have them, attention's scores.
    narrow = 2 if settings.dtype == "bfloat16" else FLOAT
    split = 8 * (query + 2 * key) + 2 * query + 5 * shape.mlp
    split += 0 if torch.cuda.is_available() else 3 * SHORT_ROW * shape.heads
    layer = 10 * hidden * FLOAT + split * narrow // settings.tensor_parallel
    layers = -(-shape.layers // settings.pipeline_parallel)
    kept = layers * hidden * FLOAT + layer if settings.gradient_checkpointing else layers * layer
    logits = 3 * min(
        CHUNK_LOGITS["cuda" if torch.cuda.is_available() else "cpu"], tokens * shape.vocabulary
    )
    return tokens * (kept + 8 * hidden * FLOAT) + logits * FLOAT


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _split(name: str, parameter: nn.Parameter, ranks: int) -> tuple[int, ...]:
    """The shape of a rank's part under FSDP's tensor parallel; a vector or an embedding is whole on each."""
    shape = list(parameter.shape)
    owner = name.rsplit(".", 1)[0]
    if ranks > 1 and owner.endswith(COLUMNS):
        shape[0] = -(-shape[0] // ranks)
    elif ranks > 1 and owner.endswith(ROWS) and len(shape) > 1:
        shape[1] = -(-shape[1] // ranks)
    return tuple(shape)
