"""Builds the parts of a worker, inside that worker: which roles it plays decides what it loads.

Actor and rollout in one worker share memory: the engine's weights are the trainer's parameters. Under LoRA the two differ, and with
placement.overlap they work at the same time, so the engine has a copy of its own; under LoRA the reference model is the actor's with its
adapters off. In a group of ranks the engine, or a reward model, lives on the first; its copy of the weights comes through shared memory,
as in a worker of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.types import Role


def build_parts(
    roles: Sequence[Role], config: RunConfig, model_path: str, threads: int
) -> Mapping[str, Any]:
    import torch

    from paceline.remote.group import is_first_rank
    from paceline.train.phases import Phases

    beside = config.placement.overlap and {Role.ACTOR, Role.ROLLOUT} <= set(roles)
    torch.set_num_threads(max(1, threads // 2) if beside else threads)
    parts: dict[str, Any] = {}
    engine = None
    here = Role.ROLLOUT in roles and is_first_rank()
    phases = Phases() if here and not beside else None
    if Role.ACTOR in roles:
        parts[Role.ACTOR], engine = _actor(config, model_path, phases)
    if Role.CRITIC in roles:
        parts[Role.CRITIC] = _critic(config, model_path, phases)
    if Role.REF in roles:
        parts[Role.REF] = _ref(config, model_path, engine, phases)
    if Role.REWARD in roles and is_first_rank():
        parts[Role.REWARD] = _reward(config)
    if here and config.rollout.engine == "vllm":
        parts[Role.ROLLOUT] = _vllm(config, model_path, engine, parts.get(Role.ACTOR))
    elif here:
        parts[Role.ROLLOUT] = _rollout(config, model_path, engine)
    return parts


def _engine(config: RunConfig, model_path: str, head: Literal["policy", "value"] = "policy") -> Any:
    """The back end the run asks for, with this model in it; a critic is one without its output layer."""
    from paceline.model.loading import load_model, model_body

    settings, temperature = config.train, config.rollout.temperature
    if settings.backend == "megatron":
        return _megatron(config, model_path, head)
    model = load_model(
        model_path
    )  # float32 whatever train.dtype says: that is the type of the products, not of what is learned
    if settings.backend == "fsdp":
        from paceline.train.fsdp import Fsdp

        return Fsdp(model if head == "policy" else model_body(model), settings, temperature, head)
    from paceline.train.single import SingleDevice

    model.to(_device())
    return SingleDevice(
        model if head == "policy" else model_body(model), settings, temperature, head
    )


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _megatron(config: RunConfig, model_path: str, head: Literal["policy", "value"]) -> Any:
    """Each rank reads its own part of the weights; only what is not in safetensors is loaded whole."""
    from paceline.model.loading import load_config, load_model
    from paceline.model.tensor_file import TensorFiles

    try:
        from paceline.train.megatron import Megatron
    except ImportError as error:
        raise ConfigError(
            f"train.backend = 'megatron' needs megatron-core ({error}): pip install 'paceline[megatron]'"
        ) from error
    files = sorted(Path(model_path).glob("*.safetensors"))
    weights: Mapping[str, Any] = (
        TensorFiles(files) if files else load_model(model_path).state_dict()
    )
    return Megatron(
        load_config(model_path), weights, config.train, config.rollout.temperature, head
    )


def _actor(config: RunConfig, model_path: str, phases: Any) -> tuple[Any, Any]:
    from paceline.model.loading import load_model
    from paceline.train.actor import Actor
    from paceline.train.lora import LoraDevice
    from paceline.train.service import ActorService

    if config.train.lora:
        engine: Any = LoraDevice(
            load_model(model_path).to(_device()),
            config.train,
            config.rollout.temperature,
            config.seed,
        )
    else:
        engine = _engine(config, model_path)
    actor = Actor(
        engine, config.algorithm, config.train, config.steps, config.rollout.max_response_length
    )
    return ActorService(actor, config.train.offload, phases), engine


def _critic(config: RunConfig, model_path: str, phases: Any) -> Any:
    from paceline.train.critic import Critic
    from paceline.train.service import CriticService

    critic = Critic(
        _engine(config, model_path, "value"), config.algorithm, config.train, config.steps
    )
    return CriticService(critic, config.train.offload, phases)


def _ref(config: RunConfig, model_path: str, actor: Any, phases: Any) -> Any:
    from paceline.train.lora import LoraDevice
    from paceline.train.service import RefService

    if isinstance(actor, LoraDevice):
        return RefService(actor, config.train.offload, actor.adapters_off, phases)
    return RefService(_engine(config, model_path), config.train.offload, phases=phases)


def _reward(config: RunConfig) -> Any:
    from paceline.reward.model import RewardModel

    assert config.reward.model, "planned only when there is one"
    return RewardModel(config.reward.model, config.train.dtype, config.train.micro_batch_tokens)


def _rollout(config: RunConfig, model_path: str, actor: Any) -> Any:
    from paceline.model.loading import load_config, load_tokenizer
    from paceline.rollout.native.engine import NativeEngine
    from paceline.rollout.service import RolloutService
    from paceline.train.colocated import ColocatedEngine
    from paceline.train.single import SingleDevice

    decode: Callable[[list[int]], str] | None = (
        load_tokenizer(model_path).decode if config.rollout.stop else None
    )
    weights, newest = _rollout_weights(config, model_path, actor)
    engine = NativeEngine(
        load_config(model_path),
        weights,
        slots=config.slots,
        max_length=config.data.max_prompt_length + config.rollout.max_response_length,
        decode=decode,
        kv_memory_fraction=config.rollout.kv_memory_fraction,
        brief=config.placement.overlap,
    )
    if isinstance(actor, SingleDevice):
        release_device = (
            None
            if config.placement.overlap
            else engine.sleep
            if config.train.offload
            else engine.wait_idle
        )
        actor.colocated.append(
            ColocatedEngine(
                "keys and values of the rollout engine", engine.cache_bytes, release_device
            )
        )
    return RolloutService(engine, newest)


def _rollout_weights(config: RunConfig, model_path: str, actor: Any) -> tuple[Any, Any]:
    """The engine's weights, and where it gets newer ones when the trainer is here but its weights are not the engine's own."""
    from paceline.model.engine_weights import engine_weights
    from paceline.model.loading import load_model
    from paceline.train.lora import LoraDevice
    from paceline.train.single import SingleDevice

    longest = config.data.max_prompt_length + config.rollout.max_response_length
    if isinstance(actor, SingleDevice) and not isinstance(actor, LoraDevice):
        if not config.placement.overlap:
            return actor.shared_weights(longest), None
        return actor.copied_weights(longest), lambda: nullcontext(actor.current_weights())
    weights = engine_weights(
        load_model(model_path, config.train.dtype).to(_device()), share=True, max_length=longest
    )
    return weights, (lambda: nullcontext(actor.merged_weights())) if isinstance(
        actor, LoraDevice
    ) else None


def _vllm(config: RunConfig, model_path: str, actor: Any, service: Any) -> Any:
    """vLLM has its weights in a form of its own, so they are copied even where the trainer is in the same worker."""
    from paceline.model.loading import load_tokenizer
    from paceline.rollout.service import RolloutService
    from paceline.rollout.vllm import VllmEngine
    from paceline.train.colocated import ColocatedEngine
    from paceline.train.lora import LoraDevice

    engine = VllmEngine(
        model_path,
        config.rollout.vllm,
        dtype=config.train.dtype,
        slots=config.slots,
        max_length=config.data.max_prompt_length + config.rollout.max_response_length,
        decode=load_tokenizer(model_path).decode if config.rollout.stop else None,
        kv_memory_fraction=config.rollout.kv_memory_fraction,
        sleeps=config.train.offload and service is not None,
    )
    if service is None:
        return RolloutService(engine)
    actor.colocated.append(
        ColocatedEngine("vLLM", engine.held_bytes, engine.sleep if config.train.offload else None)
    )
    weights = (
        actor.merged_weights
        if isinstance(actor, LoraDevice)
        else lambda: dict(actor.export_weights())
    )
    return RolloutService(engine, lambda: service.weights_at_hand(weights))
