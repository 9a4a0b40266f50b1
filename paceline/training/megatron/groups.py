"""Megatron's process groups, which all models of a worker group share."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch._C._distributed_c10d import HashStore

from paceline.errors import ConfigError


def join_group(tensor: int, pipeline: int) -> None:
    """Initialize Megatron's process groups, once per process for all its models.

    Adjacent ranks are tensor-parallel; pipeline stages are furthest apart.
    """
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
            f"{world} ranks cannot be divided into replicas of train.tensor_parallel x "
            f"train.pipeline_parallel = {tensor} x {pipeline}; set placement.train_ranks to a "
            "multiple"
        )
    if parallel_state.model_parallel_is_initialized():
        found = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
        )
        if found != (tensor, pipeline):
            raise ConfigError(
                f"train.tensor_parallel x train.pipeline_parallel = {(tensor, pipeline)}: all "
                f"models of a worker group share one layout, which is {found}"
            )
        return
    parallel_state.initialize_model_parallel(tensor, pipeline, create_gloo_process_groups=False)
    try:
        # Megatron requires its random generators to be seeded, although training is not random.
        model_parallel_cuda_manual_seed(0)
    except (AssertionError, RuntimeError) as error:
        raise ConfigError(
            f"train.backend = 'megatron' needs a CUDA device ({error}); use 'single' or 'fsdp'"
        ) from error
