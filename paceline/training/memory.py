"""Estimate of the training memory of each rank, from the model's configuration alone.

It is for planning, before a model is loaded. Parameters, gradients and optimizer state are exact
for the sharding of each backend. Activations are an upper bound for one full micro-batch.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, PretrainedConfig

from paceline.model.attention import SHORT_ROW
from paceline.model.creation import empty_model
from paceline.model.shape import model_shape
from paceline.model.support import trains_fast
from paceline.training.head import CHUNK_LOGITS, chunk_rows
from paceline.training.settings import TrainSettings

FLOAT = 4  # bytes; all parameters are float32
# Layers that tensor parallelism splits by columns and by rows.
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWS = ("o_proj", "down_proj")

Shape = tuple[int, ...]
# By class and configuration; an entry keeps its configuration, so that its id stays unique.
_shapes: dict[tuple[Any, int], tuple[PretrainedConfig, dict[str, Shape]]] = {}
REMEMBERED = 16


def memory_estimate(
    config: PretrainedConfig,
    settings: TrainSettings,
    ranks: int = 1,
    *,
    gpu: bool | None = None,
    critic: bool = False,
) -> dict[str, int]:
    """Return the bytes on the rank that holds the most, by purpose.

    "activations" is an upper bound; "gathered" are weights and gradients that exist in full for a
    layer at a time. `gpu`: whether the ranks have GPUs; default: as this machine. `critic`: with a
    value head instead of the output layer.
    """
    gpu = torch.cuda.is_available() if gpu is None else gpu
    shapes = parameter_shapes(config, AutoModel if critic else AutoModelForCausalLM)
    tensor, pipeline = settings.tensor_parallel, settings.pipeline_parallel
    replicas = ranks // (tensor * pipeline)
    gathered, narrow = 0, settings.dtype == "bfloat16"
    fused = gpu and not critic and _is_fused(config, settings)
    if settings.backend == "single":
        held = state = sum(map(_numel, shapes.values()))
    elif settings.backend == "fsdp":
        split = {name: _split(name, shape, tensor) for name, shape in shapes.items()}
        held = state = sum(-(-shape[0] // replicas) * _numel(shape[1:]) for shape in split.values())
        gathered = _gathered(split, replicas, 2 if narrow else FLOAT, 2 if fused else FLOAT)
    else:
        held = _fullest_stage(shapes, tensor, pipeline)
        state = -(-held // replicas)
        gathered = held * 2 * narrow  # autocast keeps a bfloat16 copy from forward to backward
    # See fused.py: the explicit passes on one GPU keep a bfloat16 copy of the weights.
    copied = settings.backend == "single" and fused
    return {
        "parameters": held * (FLOAT + 2 * copied),
        "gradients": held * FLOAT,
        "optimizer": 2 * state * FLOAT,
        "activations": activation_bound(config, settings, gpu=gpu, critic=critic),
        "gathered": gathered,
    }


def activation_bound(
    config: PretrainedConfig,
    settings: TrainSettings,
    *,
    gpu: bool | None = None,
    critic: bool = False,
    train: bool = True,
) -> int:
    """Return the bytes of one micro-batch's saved activations and of the output layer.

    Without `train`, a pass saves nothing for a backward pass.
    """
    gpu = torch.cuda.is_available() if gpu is None else gpu
    shape, tokens = model_shape(config), settings.micro_batch_tokens
    tensor, stages = settings.tensor_parallel, settings.pipeline_parallel
    hidden, query, key = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if gpu and not critic and _is_fused(config, settings):
        # See LayerActivations: two float32 residuals, and in bfloat16 two norms, queries, keys and
        # values twice, the attention output, gate and up. A chunk of logits is float32; all
        # probabilities, or the gradients of a chunk, are bfloat16. After them, one layer at a time
        # has its gradients.
        inside = 8 * hidden + 4 * (query + 2 * key) + 2 * query + 4 * shape.mlp
        layers = shape.layers if train else 1
        kept = layers * 4 * hidden
        kept += inside if settings.gradient_checkpointing else layers * inside
        every = tokens * shape.vocabulary
        logits = min(CHUNK_LOGITS["cuda"], every)
        narrow = every if train and not settings.gradient_checkpointing else logits
        head, layer = logits * FLOAT + narrow * 2, tokens * (8 * hidden * FLOAT + 8 * shape.mlp)
        return tokens * kept + max(head, layer)
    # In float32: two norms of about four tensors each, and the residual twice. In the compute
    # dtype: queries, keys and values before and after rotation and unpacking, the attention output
    # twice, five MLP tensors, and on a CPU the attention scores of rows of up to SHORT_ROW tokens.
    itemsize = 2 if settings.dtype == "bfloat16" else FLOAT
    split = 8 * (query + 2 * key) + 2 * query + 5 * shape.mlp
    split += 0 if gpu else 3 * SHORT_ROW * shape.heads
    # Megatron's sequence parallelism also splits what tensor parallelism does not.
    residual = hidden * FLOAT // (tensor if settings.backend == "megatron" else 1)
    layer = 10 * residual + split * itemsize // tensor
    # The first pipeline stage has a micro-batch in flight for each stage.
    layers = -(-shape.layers // stages) * stages if train else 1
    kept = layers * residual + layer if settings.gradient_checkpointing else layers * layer
    rows = 0 if critic else min(tokens, chunk_rows("cuda" if gpu else "cpu", shape.vocabulary))
    return tokens * (kept + 8 * hidden * FLOAT) + 3 * rows * shape.vocabulary * FLOAT


def _is_fused(config: PretrainedConfig, settings: TrainSettings) -> bool:
    """Return whether the explicit passes of decoder.py train this model on a GPU."""
    plain = settings.lora is None and settings.tensor_parallel == 1
    narrow = settings.dtype == "bfloat16" and settings.backend != "megatron"
    return plain and narrow and trains_fast(config)


def parameter_shapes(
    config: PretrainedConfig, kind: Any = AutoModelForCausalLM
) -> Mapping[str, Shape]:
    """Return the shape of every parameter by name; tied weights appear once.

    `kind`: an auto class of transformers.
    """
    key = kind, id(config)
    if key not in _shapes:
        if len(_shapes) >= REMEMBERED:
            _shapes.clear()
        model = empty_model(config, kind)
        _shapes[key] = config, {name: tuple(p.shape) for name, p in model.named_parameters()}
    return _shapes[key][1]


def parameter_count(config: PretrainedConfig, kind: Any = AutoModelForCausalLM) -> int:
    return sum(map(_numel, parameter_shapes(config, kind).values()))


def largest_parameter(config: PretrainedConfig) -> int:
    return max(map(_numel, parameter_shapes(config).values()))


def _gathered(shapes: Mapping[str, Shape], replicas: int, item: int, root_item: int) -> int:
    """Return the bytes of unsharded weights and gradients at the peak of FSDP's backward pass.

    `item`: bytes of a gathered weight of a layer, `root_item` of the others.
    """
    layers, root = _by_layer(shapes)
    largest = max(layers.values())
    if replicas == 1:  # a single rank keeps its weights gathered until the last pass
        weights = sum(layers.values()) * item + root * root_item
        return weights + 2 * max(root, largest) * FLOAT
    # Weights and gradients of the root stay. A layer adds its weights, those of the prefetched one,
    # its gradients, and their sum in float32. At the end the root's gradients are summed.
    return max(2 * root * root_item + largest * (3 * item + FLOAT), root * (2 * root_item + FLOAT))


def _fullest_stage(shapes: Mapping[str, Shape], tensor: int, pipeline: int) -> int:
    """Return the parameters on the Megatron rank that holds the most.

    Tensor parallelism also splits the embedding and the output layer; the first and the last stage
    have one each.
    """
    layers, _ = _by_layer({name: _split(name, shape, tensor) for name, shape in shapes.items()})
    roots = [
        -(-_numel(shape) // tensor) if len(shape) > 1 else _numel(shape)
        for name, shape in shapes.items()
        if _layer(name) is None
    ]
    stage = -(-len(layers) // pipeline) * max(layers.values())
    return stage + (sum(roots) if pipeline == 1 else max(roots))


def _by_layer(shapes: Mapping[str, Shape]) -> tuple[dict[str, int], int]:
    """Return the parameters of each layer, and those outside of layers."""
    layers: dict[str, int] = {}
    root = 0
    for name, shape in shapes.items():
        layer = _layer(name)
        if layer is None:
            root += _numel(shape)
        else:
            layers[layer] = layers.get(layer, 0) + _numel(shape)
    return layers, root


def _layer(name: str) -> str | None:
    return next((part for part in name.split(".") if part.isdigit()), None)


def _numel(shape: Shape) -> int:
    return torch.Size(shape).numel()


def _split(name: str, parameter: Shape, ranks: int) -> Shape:
    """Return the shape of one tensor-parallel rank's part of a layer's parameter.

    Vectors are replicated, and so are embeddings under FSDP.
    """
    shape = list(parameter)
    owner = name.rsplit(".", 1)[0]
    if ranks > 1 and owner.endswith(COLUMNS):
        shape[0] = -(-shape[0] // ranks)
    elif ranks > 1 and owner.endswith(ROWS) and len(shape) > 1:
        shape[1] = -(-shape[1] // ranks)
    return tuple(shape)
