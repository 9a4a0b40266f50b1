"""The train engine for models that need tensor and pipeline parallelism: Megatron's layers, schedule and distributed optimizer.

Every rank of the group makes the same calls with the same batch. Rows are dealt out to data-parallel replicas by tokens; within one,
tensor-parallel ranks and pipeline stages work on the same micro-batches. Loss weights are of the whole batch, so gradients of
micro-batches and replicas are added, never averaged.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from transformers import PretrainedConfig

from paceline.algo.loss import LossFn, TokenOutputs
from paceline.errors import ConfigError, ModelError
from paceline.model.packing import MicroBatch, RowLayout, micro_batch, token_data, trained_lengths
from paceline.model.tensor_file import TensorFiles
from paceline.train.megatron_model import Decoder, transformer_config
from paceline.train.megatron_shards import Read, Shards
from paceline.train.offload import HostOffload, Moved
from paceline.train.optimizer import STATE, adamw
from paceline.train.packed import Head, LossAccumulator
from paceline.train.row_assignment import passes
from paceline.train.settings import TrainSettings
from paceline.train.training_state import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    check_same_model,
    write_tensors,
)
from paceline.types import Batch, FloatArray

log = logging.getLogger(__name__)

MOMENTS = ("exp_avg", "exp_avg_sq")
Finish = Callable[[MicroBatch, TokenOutputs], Tensor]


class Megatron:
    """A TrainEngine on every rank of a process group. `weights` are those of the causal language model, by Hugging Face name.
    Sequence parallelism comes with tensor parallelism unless told otherwise."""

    def __init__(
        self,
        config: PretrainedConfig,
        weights: Mapping[str, Tensor],
        settings: TrainSettings,
        temperature: float = 1.0,
        head: Head = "policy",
        sequence_parallel: bool | None = None,
    ) -> None:
        tensor, pipeline = settings.tensor_parallel, settings.pipeline_parallel
        join_group(tensor, pipeline)
        self._config, self._settings, self._head = config, settings, head
        parallel = transformer_config(
            config, settings, tensor > 1 if sequence_parallel is None else sequence_parallel
        )
        self._device = (
            torch.device("cuda", torch.cuda.current_device())
            if torch.cuda.is_available()
            else torch.device("cpu")
        )
        self._model = Decoder(
            parallel, config, temperature or 1.0, head
        )  # greedy (0) reads log-probs at 1
        if settings.dtype != "float32":
            self._model.use_autocast(self._device)
        self._shards = Shards(self._model, config, head)
        self._shards.load(weights, prefix="" if head == "policy" else "model.")
        self._model.to(self._device)
        self._tied = head == "policy" and config.tie_word_embeddings
        self._pipeline = pipeline
        self._host_offload, self._steps = HostOffload(), 0
        self._trained: tuple[DistributedDataParallel, DistributedOptimizer] | None = None

    # -- forward and backward

    def logprobs(self, batch: Batch) -> FloatArray:
        if self._head != "policy":
            raise ModelError(
                "log-probs asked of a critic: this engine was built with head = 'value'; ask the actor's"
            )
        return self._read(batch, "logprobs")

    def values(self, batch: Batch) -> FloatArray:
        if self._head != "value":
            raise ModelError(
                "values asked of a policy: this engine was built with head = 'policy'; ask the critic's"
            )
        return self._read(batch, "values")

    def forward_backward(self, batch: Batch, loss_fn: LossFn) -> dict[str, float]:
        tally, weights = LossAccumulator(batch), loss_fn.weights(batch)

        def finish(micro: MicroBatch, outputs: TokenOutputs) -> Tensor:
            if (
                len(micro.flat) == 0
            ):  # a replica without rows: no loss, but gradients of 0 to exchange
                return 0.0 * _only(outputs).sum()
            terms = loss_fn(outputs, token_data(batch, micro, weights))
            if self._speaks():
                tally.add(terms)
            return terms.loss

        self._run(batch, finish, train=True)
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, tally.totals())
        result = LossAccumulator(batch)
        for part in found:
            result.merge(*part)
        return result.metrics()

    def _read(self, batch: Batch, name: Literal["logprobs", "values"]) -> FloatArray:
        result = np.zeros(batch.num_tokens, np.float32)

        def finish(micro: MicroBatch, outputs: TokenOutputs) -> Tensor:
            values: Tensor = getattr(outputs, name)
            if self._speaks() and len(micro.flat):
                result[micro.flat] = values.float().cpu().numpy()
            return values.sum()

        with torch.no_grad():
            self._run(batch, finish, train=False)
        dist.all_reduce(
            torch.from_numpy(result)
        )  # every token was read by one rank, the others have 0
        return result

    def _run(self, batch: Batch, finish: Finish, train: bool) -> None:
        """All micro-batches of this replica through the pipeline; the last stage has `finish` make a loss of the outputs."""
        micros = self._micro_batches(batch)
        self._model.train(
            train and self._settings.gradient_checkpointing
        )  # Megatron recomputes only in train mode
        model = self._train_parts()[0] if train else self._model

        def step(
            data: Iterator[MicroBatch], model: Any
        ) -> tuple[Any, Callable[[TokenOutputs], Any]]:
            micro = next(data)

            def loss(outputs: TokenOutputs) -> tuple[Tensor, Tensor, Any]:
                return (
                    finish(micro, outputs),
                    torch.zeros([], dtype=torch.int, device=self._device),
                    None,
                )

            return model(micro), loss

        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(micros),
            model=[model],
            num_microbatches=len(micros),
            seq_length=1,  # each micro-batch says its own
            micro_batch_size=1,
            forward_only=not train,
        )

    def _micro_batches(self, batch: Batch) -> list[MicroBatch]:
        """This replica's share. A pipeline wants as many micro-batches as stages; replicas need not have equally many."""
        needed = trained_lengths(batch)
        replicas, limit = (
            parallel_state.get_data_parallel_world_size(),
            self._settings.micro_batch_tokens,
        )
        if self._pipeline > 1:
            limit = min(limit, -(-int(needed.sum()) // (replicas * self._pipeline)))
        rows = passes(needed, limit, replicas)[parallel_state.get_data_parallel_rank()]
        return [micro_batch(batch, some, needed, self._device) for some in rows if len(some)] or [
            _nothing(self._device)
        ]

    def _speaks(self) -> bool:
        """One rank of each replica tells what the replica found."""
        return (
            bool(parallel_state.is_pipeline_last_stage())
            and parallel_state.get_tensor_model_parallel_rank() == 0
        )

    # -- update

    def _train_parts(self) -> tuple[DistributedDataParallel, DistributedOptimizer]:
        """Gradient buffers and optimizer. Made when first needed: a reference model never is trained."""
        if self._trained is None:
            ddp = DistributedDataParallel(
                self._model.config,
                DistributedDataParallelConfig(
                    use_distributed_optimizer=True,
                    overlap_grad_reduce=False,
                    grad_reduce_in_fp32=True,
                ),
                self._model,
            )
            with torch.no_grad():  # the optimizer's parameters are views into the model's
                optimizer = DistributedOptimizer(
                    adamw(self._shards.parameters, self._settings),
                    OptimizerConfig(optimizer="adam", use_distributed_optimizer=True),
                    grad_scaler=None,
                    init_state_fn=None,
                    model_chunks=[ddp],
                    per_model_buffers={0: ddp.buffers},
                    data_parallel_group=parallel_state.get_data_parallel_group(),
                    data_parallel_group_gloo=None,
                    data_parallel_group_idx=0,
                    distributed_optimizer_instance_id=0,
                )
            optimizer.grad_stats_parallel_group = dist.group.WORLD
            optimizer.tp_group = parallel_state.get_tensor_model_parallel_group()
            self._trained = ddp, optimizer
            ddp.zero_grad_buffer()
        return self._trained

    def optimizer_step(self, lr: float) -> float:
        ddp, optimizer = self._train_parts()
        finalize_model_grads([ddp])
        optimizer.prepare_grads()
        norm = float(
            optimizer.clip_grad_norm(self._settings.max_grad_norm)
        )  # of all ranks, so all take the same branch
        if math.isfinite(norm):
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step_with_ready_grads()
            self._steps += 1
        else:
            log.warning("gradient norm is %s: step skipped, weights unchanged", norm)
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        return norm if math.isfinite(norm) else math.nan

    # -- weights out and in

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._shards.gather():
            if not name.startswith("value_head"):
                yield name, tensor
            if self._tied and name == "model.embed_tokens.weight":
                yield "lm_head.weight", tensor

    def save(self, folder: Path) -> None:
        shapes = self._shards.shapes()
        write_tensors(
            folder / MODEL_FILE,
            [(name, shape, torch.float32) for name, shape in shapes.items()],
            self._tensors(),
        )
        state = [
            (f"{key}:{name}", shape if key in MOMENTS else (), torch.float32)
            for key in STATE
            for name, shape in shapes.items()
        ]
        write_tensors(
            folder / OPTIMIZER_FILE,
            state if self._steps else [],
            self._state() if self._steps else iter(()),
        )
        if dist.get_rank() == 0:
            self._config.save_pretrained(folder)

    def _tensors(self, read: Read = lambda parameter: parameter.detach()) -> Iterator[Tensor]:
        return (tensor for _, tensor in self._shards.gather(read))

    def _state(self) -> Iterator[Tensor]:
        """AdamW's state in the order of STATE: how many steps it has made, and two moments of each weight."""
        yield from (torch.tensor(float(self._steps)) for _ in self._shards.shapes())
        yield from self._tensors(lambda parameter: self._moment(parameter, "exp_avg"))
        yield from self._tensors(lambda parameter: self._moment(parameter, "exp_avg_sq"))

    def _moment(self, parameter: nn.Parameter, key: str) -> Tensor:
        """Of this rank's part of a weight; each data-parallel replica keeps a stretch of it."""
        flat = torch.zeros(parameter.numel(), device=parameter.device)
        stretch = self._stretch(parameter)
        if stretch is not None:
            main, where = stretch
            flat[where] = self._train_parts()[1].state[main][key]
        dist.all_reduce(flat, group=parallel_state.get_data_parallel_group())
        return flat.view_as(parameter)

    def _stretch(self, parameter: nn.Parameter) -> tuple[Tensor, slice] | None:
        """What the optimizer here has of a parameter: the tensor it updates, and where in the parameter that is."""
        optimizer = self._train_parts()[1]
        if parameter not in optimizer.model_param_group_index_map:
            return None
        group, index = optimizer.model_param_group_index_map[parameter]
        where = optimizer._get_model_param_range_map(parameter)["param"]
        return optimizer.param_groups[group]["params"][index], slice(where.start, where.end)

    def load(self, folder: Path) -> None:
        weights, state = TensorFiles([folder / MODEL_FILE]), TensorFiles([folder / OPTIMIZER_FILE])
        shapes = self._shards.shapes()
        check_same_model(folder / MODEL_FILE, shapes, weights.shapes())
        expected = {
            f"{key}:{name}": shape if key in MOMENTS else ()
            for key in STATE
            for name, shape in shapes.items()
        }
        if len(state):
            check_same_model(folder / OPTIMIZER_FILE, expected, state.shapes())
        ddp, optimizer = self._train_parts()
        self._shards.load(weights)
        optimizer.state.clear()
        self._steps = int(max(float(state[f"step:{name}"]) for name in shapes)) if len(state) else 0
        for slot, parameter in self._shards.own():
            stretch = self._stretch(parameter) if len(state) else None
            if stretch is not None:
                main, where = stretch
                entry = {
                    "step": state[f"step:{next(iter(slot.parts))}"].to(self._device, copy=True)
                }
                for key in MOMENTS:
                    shard = torch.empty_like(parameter)
                    self._shards.fill(shard, slot, lambda name, key=key: state[f"{key}:{name}"])  # type: ignore[misc]
                    entry[key] = shard.view(-1)[where].clone()
                optimizer.state[main] = entry
        ddp.zero_grad_buffer()

    def place(self, where: Literal["device", "host"]) -> Moved:
        return (
            self._host_offload.restore()
            if where == "device"
            else self._host_offload.offload(self._movable())
        )

    def _movable(self) -> Iterator[Tensor]:
        yield from self._shards.parameters.values()
        if self._trained is not None:
            ddp, optimizer = self._trained
            yield from (buffer.grad_data for buffer in ddp.buffers)
            yield from (tensor for state in optimizer.state.values() for tensor in state.values())


def join_group(tensor: int, pipeline: int) -> None:
    """Lay the process group out: tensor-parallel neighbours first, pipeline stages last. Once per process, for all its models."""
    if not dist.is_initialized():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=HashStore(),
            rank=0,
            world_size=1,
        )
    world = dist.get_world_size()
    if world % (tensor * pipeline):
        raise ConfigError(
            f"{world} ranks cannot be divided into replicas of train.tensor_parallel x train.pipeline_parallel = {tensor} x {pipeline}: "
            "set placement.train_ranks to a multiple"
        )
    if parallel_state.model_parallel_is_initialized():
        found = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
        )
        if found != (tensor, pipeline):
            raise ConfigError(
                f"models in one worker group share its layout: tensor x pipeline is {found} here, not {(tensor, pipeline)}"
            )
        return
    parallel_state.initialize_model_parallel(tensor, pipeline, create_gloo_process_groups=False)
    try:
        model_parallel_cuda_manual_seed(
            0
        )  # nothing here is random, but Megatron wants its generators set
    except (AssertionError, RuntimeError) as error:
        raise ConfigError(
            f"train.backend = 'megatron' needs a CUDA device ({error}); use 'single' or 'fsdp' here"
        ) from error


def _only(outputs: TokenOutputs) -> Tensor:
    found = outputs.logprobs if outputs.logprobs is not None else outputs.values
    assert found is not None
    return found


def _nothing(device: torch.device) -> MicroBatch:
    """A forward pass over one token that teaches nothing."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return MicroBatch(
        zero[None], zero[None], RowLayout(1, 1, zero, zero), zero, zero, zero, np.zeros(0, np.int64)
    )
