"""Train engine with tensor and pipeline parallelism, built on megatron-core.

Megatron provides the layers, the pipeline schedule and the distributed optimizer. Every rank makes
the same calls with the same batch. Rows are assigned to data-parallel replicas by token count;
within a replica, all ranks process the same micro-batches. Gradients are summed, not averaged,
because the loss weights already refer to the whole batch.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
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
from torch import Tensor, nn
from transformers import PretrainedConfig

from paceline.algo.loss import LossFn, TokenOutputs
from paceline.model.hub_names import HubFormat, TensorFormat
from paceline.model.loading import default_device, load_config, load_model
from paceline.model.packing import MicroBatch, RowLayout, micro_batch, trained_lengths
from paceline.model.stored_weights import safetensors_files
from paceline.model.tensor_file import TensorFiles
from paceline.training.loss_accumulator import LossAccumulator
from paceline.training.megatron.decoder import Decoder, transformer_config
from paceline.training.megatron.groups import join_group
from paceline.training.megatron.shards import RankSlices, Shards
from paceline.training.offload import HostOffload, Moved
from paceline.training.optimizer import STATE, adamw
from paceline.training.packed import EngineWithHead, Head, token_data
from paceline.training.rank_files import Replicated, Split
from paceline.training.row_assignment import assign_passes
from paceline.training.settings import TrainSettings
from paceline.training.training_state import (
    check_same_model,
    open_optimizer,
    role_of,
    save_optimizer_by_ranks,
    write_model_by_ranks,
)
from paceline.types import Batch, FloatArray

MOMENTS = ("exp_avg", "exp_avg_sq")
Finish = Callable[[MicroBatch, TokenOutputs], Tensor]


class Megatron(EngineWithHead):
    """A TrainEngine on every rank of a process group.

    `weights` are the causal language model's, by Hugging Face name. `sequence_parallel` defaults to
    True with tensor parallelism.
    """

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
        self._device = default_device()
        # At temperature 0 (greedy), log-probs are those at temperature 1.
        self._model = Decoder(parallel, config, temperature or 1.0, head)
        if settings.dtype != "float32":
            self._model.use_autocast(self._device)
        self._shards = Shards(self._model, config, head)
        self._shards.load(weights, prefix="" if head == "policy" else "model.")
        self._model.to(self._device)
        self._form = (
            HubFormat.of_config(config)
            if head == "policy"
            else TensorFormat(dict.fromkeys(self._shards.shapes(), torch.empty(0)))
        )
        self._tied = head == "policy" and config.tie_word_embeddings
        self._pipeline = pipeline
        self._host_offload, self._steps = HostOffload(), 0
        self._trained: tuple[DistributedDataParallel, DistributedOptimizer] | None = None

    @classmethod
    def open(
        cls, model_path: str, settings: TrainSettings, temperature: float, head: Head
    ) -> "Megatron":
        """Read this rank's part of safetensors files; load other formats as a whole."""
        files = safetensors_files(model_path)
        weights = TensorFiles(files) if files else load_model(model_path).state_dict()
        return cls(load_config(model_path), weights, settings, temperature, head)

    # -- forward and backward

    def forward_backward(self, batch: Batch, loss_fn: LossFn) -> dict[str, float]:
        totals, weights = LossAccumulator(batch), loss_fn.weights(batch)

        def finish(micro: MicroBatch, outputs: TokenOutputs) -> Tensor:
            if len(micro.flat) == 0:
                # A replica without rows has no loss, but must exchange gradients of 0.
                return 0.0 * _main_output(outputs).sum()
            terms = loss_fn(outputs, token_data(batch, micro, weights))
            if self._reports():
                totals.add(terms)
            return terms.loss

        self._run(batch, finish, train=True)
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, totals.totals())
        result = LossAccumulator(batch)
        for part in parts:
            result.merge(*part)
        return result.metrics()

    def _read(self, batch: Batch, name: Literal["logprobs", "values"]) -> FloatArray:
        result = np.zeros(batch.num_tokens, np.float32)

        def finish(micro: MicroBatch, outputs: TokenOutputs) -> Tensor:
            values: Tensor = getattr(outputs, name)
            if self._reports() and len(micro.flat):
                result[micro.flat] = values.float().cpu().numpy()
            return values.sum()

        with torch.no_grad():
            self._run(batch, finish, train=False)
        # One rank has the value of each token; the other ranks have 0.
        dist.all_reduce(torch.from_numpy(result))
        return result

    def _run(self, batch: Batch, finish: Finish, train: bool) -> None:
        """Run this replica's micro-batches through the pipeline.

        The last stage calls `finish` to turn the outputs of a micro-batch into a loss.
        """
        micros = self._micro_batches(batch)
        # Megatron recomputes activations only in train mode.
        self._model.train(train and self._settings.gradient_checkpointing)
        model = self._train_parts()[0] if train else self._model

        def step(
            data: Iterator[MicroBatch], model: Any
        ) -> tuple[Any, Callable[[TokenOutputs], Any]]:
            micro = next(data)

            def loss(outputs: TokenOutputs) -> tuple[Tensor, Tensor, Any]:
                token_count = torch.zeros([], dtype=torch.int, device=self._device)
                return finish(micro, outputs), token_count, None

            return model(micro), loss

        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(micros),
            model=[model],
            num_microbatches=len(micros),
            seq_length=1,  # ignored: sequence lengths are variable
            micro_batch_size=1,
            forward_only=not train,
        )

    def _micro_batches(self, batch: Batch) -> list[MicroBatch]:
        """Return this replica's micro-batches; replicas can have different numbers.

        A pipeline is efficient with at least as many micro-batches as stages.
        """
        lengths = trained_lengths(batch)
        replicas = parallel_state.get_data_parallel_world_size()
        limit = self._settings.micro_batch_tokens
        if self._pipeline > 1:
            limit = min(limit, -(-int(lengths.sum()) // (replicas * self._pipeline)))
        assigned = assign_passes(lengths, limit, replicas)
        passes = assigned[parallel_state.get_data_parallel_rank()]
        micros = [micro_batch(batch, rows, lengths, self._device) for rows in passes if len(rows)]
        return micros or [_untrained_token(self._device)]

    def _reports(self) -> bool:
        """Return whether this rank reports the results of its replica: one rank of each does."""
        return (
            bool(parallel_state.is_pipeline_last_stage())
            and parallel_state.get_tensor_model_parallel_rank() == 0
        )

    # -- update

    def _train_parts(self) -> tuple[DistributedDataParallel, DistributedOptimizer]:
        """Return the gradient buffers and the optimizer.

        They are created on first use, because a reference model is never trained.
        """
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

    def optimizer_step(self, lr: float, skip: bool = False) -> float:
        ddp, optimizer = self._train_parts()
        finalize_model_grads([ddp])
        optimizer.prepare_grads()
        # The norm covers all ranks, so all of them take the same branch.
        norm = float(optimizer.clip_grad_norm(self._settings.max_grad_norm))
        if math.isfinite(norm) and not skip:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step_with_ready_grads()
            self._steps += 1
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        return norm if math.isfinite(norm) else math.nan

    # -- export, save and load

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._shards.gather():
            if not name.startswith("value_head"):
                yield name, tensor
            if self._tied and name == "model.embed_tokens.weight":
                yield "lm_head.weight", tensor

    def save(self, folder: Path) -> None:
        weights = self._shards.splits(self._slices(), lambda parameter: parameter.detach())
        to = folder / role_of(self._head)
        write_model_by_ranks(to, self._form, self._config, weights, self._device)
        state = self._state() if self._steps else []
        save_optimizer_by_ranks(folder, self._head, state, self._device)

    def _state(self) -> list[Split]:
        """Return AdamW's state in the order of STATE: step counts, then moments of each weight."""
        steps = torch.tensor(float(self._steps))
        found: list[Split] = [Replicated(f"step:{name}", steps) for name in self._shards.shapes()]
        held = {
            mapping.name: self._optimizer_slice(parameter)
            for mapping, parameter in self._shards.local()
        }
        slices = self._slices({n: (h[1].start, h[1].stop) for n, h in held.items() if h})
        for key in MOMENTS:
            found += self._shards.splits(slices, partial(self._moment, key), f"{key}:")
        return found

    def _slices(self, ranges: dict[str, tuple[int, int]] | None = None) -> list[RankSlices]:
        """Exchange which ranges of their shards the ranks hold."""
        own = RankSlices(
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
            ranges,
        )
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, own)
        return ranks

    def _moment(self, key: str, parameter: nn.Parameter) -> Tensor:
        """Return this rank's range of a moment."""
        held = self._optimizer_slice(parameter)
        assert held is not None, "only ranks with a range are asked"
        moment: Tensor = self._train_parts()[1].state[held[0]][key]
        return moment

    def _optimizer_slice(self, parameter: nn.Parameter) -> tuple[Tensor, slice] | None:
        """Return the tensor that this rank's optimizer updates and its range in the parameter."""
        optimizer = self._train_parts()[1]
        if parameter not in optimizer.model_param_group_index_map:
            return None
        group, index = optimizer.model_param_group_index_map[parameter]
        where = optimizer._get_model_param_range_map(parameter)["param"]
        return optimizer.param_groups[group]["params"][index], slice(where.start, where.end)

    def load(self, folder: Path) -> None:
        weights = TensorFiles.of_model(folder / role_of(self._head))
        state = open_optimizer(folder, self._head)
        shapes = self._shards.shapes()
        check_same_model(weights.path, shapes, weights.shapes())
        expected = {
            f"{key}:{name}": shape if key in MOMENTS else ()
            for key in STATE
            for name, shape in shapes.items()
        }
        if len(state):
            check_same_model(state.path, expected, state.shapes())
        ddp, optimizer = self._train_parts()
        self._shards.load(weights)
        optimizer.state.clear()
        self._steps = int(max(float(state[f"step:{name}"]) for name in shapes)) if len(state) else 0
        for mapping, parameter in self._shards.local():
            held = self._optimizer_slice(parameter) if len(state) else None
            if held is not None:
                main, where = held
                step = state[f"step:{next(iter(mapping.parts))}"]
                entry = {"step": step.to(self._device, copy=True)}
                for key in MOMENTS:
                    shard = torch.empty_like(parameter)
                    self._shards.fill(shard, mapping, state, prefix=f"{key}:")
                    entry[key] = shard.view(-1)[where].clone()
                optimizer.state[main] = entry
        ddp.zero_grad_buffer()

    def place(self, where: Literal["device", "host"]) -> Moved:
        return self._host_offload.place(where, self._movable())

    def _movable(self) -> Iterator[Tensor]:
        yield from self._shards.parameters.values()
        if self._trained is not None:
            ddp, optimizer = self._trained
            yield from (buffer.grad_data for buffer in ddp.buffers)
            yield from (tensor for state in optimizer.state.values() for tensor in state.values())


def _main_output(outputs: TokenOutputs) -> Tensor:
    """Return the log-probs of a policy or the values of a critic."""
    output = outputs.logprobs if outputs.logprobs is not None else outputs.values
    assert output is not None
    return output


def _untrained_token(device: torch.device) -> MicroBatch:
    """Return a micro-batch of one token that is not trained on."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return MicroBatch(
        zero[None], zero[None], RowLayout(1, 1, zero, zero), zero, zero, zero, np.zeros(0, np.int64)
    )
