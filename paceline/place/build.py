"""Builds the parts of a worker, inside that worker: which roles it plays decides what it loads.

Actor and rollout in one worker share memory: the engine's weights are the trainer's parameters. Under LoRA the two differ, so
the engine has a copy of its own, but the reference model is the actor's with its adapters off. In a group of ranks the engine, or
a reward model, lives on the first; its copy of the weights comes through shared memory, as in a worker of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.types import Role


def build_parts(roles: Sequence[Role], config: RunConfig, model_path: str, threads: int) -> Mapping[str, Any]:
    import torch

    from paceline.place.group import is_first_rank

    torch.set_num_threads(threads)
    parts: dict[str, Any] = {}
    engine = None
    if Role.ACTOR in roles:
        parts[Role.ACTOR], engine = _actor(config, model_path)
    if Role.CRITIC in roles:
        parts[Role.CRITIC] = _critic(config, model_path)
    if Role.REF in roles:
        parts[Role.REF] = _ref(config, model_path, engine)
    if Role.REWARD in roles and is_first_rank():
        parts[Role.REWARD] = _reward(config)
    if Role.ROLLOUT in roles and is_first_rank():
        parts[Role.ROLLOUT] = _rollout(config, model_path, engine)
    return parts


def _engine(config: RunConfig, model_path: str, head: Literal["policy", "value"] = "policy") -> Any:
    """The back end the run asks for, with this model in it; a critic is one without its output layer."""
    from paceline.models import load_model

    settings, temperature = config.train, config.rollout.temperature
    if settings.backend == "megatron":
        return _megatron(config, model_path, head)
    model = load_model(model_path)  # float32 whatever train.dtype says: that is the type of the products, not of what is learned
    if settings.backend == "fsdp":
        from paceline.train.fsdp import Fsdp

        return Fsdp(model if head == "policy" else model.base_model, settings, temperature, head)
    from paceline.train.single import SingleDevice

    return SingleDevice(model if head == "policy" else model.base_model, settings, temperature, head)


def _megatron(config: RunConfig, model_path: str, head: Literal["policy", "value"]) -> Any:
    """Each rank reads its own part of the weights; only what is not in safetensors is loaded whole."""
    from paceline.models import load_config, load_model
    from paceline.train.tensor_file import TensorFiles

    try:
        from paceline.train.megatron import Megatron
    except ImportError as error:
        raise ConfigError(f"train.backend = 'megatron' needs megatron-core ({error}): pip install 'paceline[megatron]'") from error
    files = sorted(Path(model_path).glob("*.safetensors"))
    weights: Mapping[str, Any] = TensorFiles(files) if files else load_model(model_path).state_dict()
    return Megatron(load_config(model_path), weights, config.train, config.rollout.temperature, head)


def _actor(config: RunConfig, model_path: str) -> tuple[Any, Any]:
    from paceline.models import load_model
    from paceline.train.actor import Actor
    from paceline.train.lora import LoraDevice
    from paceline.train.service import ActorService

    if config.train.lora:
        engine: Any = LoraDevice(load_model(model_path), config.train, config.rollout.temperature, config.seed)
    else:
        engine = _engine(config, model_path)
    actor = Actor(engine, config.algorithm, config.train, config.steps, config.rollout.max_response_length)
    return ActorService(actor, config.train.offload), engine


def _critic(config: RunConfig, model_path: str) -> Any:
    from paceline.train.critic import Critic
    from paceline.train.service import CriticService

    critic = Critic(_engine(config, model_path, "value"), config.algorithm, config.train, config.steps)
    return CriticService(critic, config.train.offload)


def _ref(config: RunConfig, model_path: str, actor: Any) -> Any:
    from paceline.train.lora import LoraDevice
    from paceline.train.service import RefService

    if isinstance(actor, LoraDevice):
        return RefService(actor, config.train.offload, actor.adapters_off)
    return RefService(_engine(config, model_path), config.train.offload)


def _reward(config: RunConfig) -> Any:
    from paceline.reward.model import RewardModel

    assert config.reward.model, "planned only when there is one"
    return RewardModel(config.reward.model, config.train.dtype, config.train.micro_batch_tokens)


def _rollout(config: RunConfig, model_path: str, actor: Any) -> Any:
    import torch

    from paceline.models import load_model, load_tokenizer
    from paceline.rollout.native.engine import NativeEngine
    from paceline.rollout.native.weights import DecoderWeights
    from paceline.rollout.service import RolloutService
    from paceline.train.lora import LoraDevice
    from paceline.train.single import SingleDevice

    decode: Callable[[list[int]], str] | None = load_tokenizer(model_path).decode if config.rollout.stop else None
    lent = actor.lend_model() if isinstance(actor, SingleDevice) else None
    merged = actor.merged_weights if isinstance(actor, LoraDevice) else None
    share = lent is not None and merged is None
    model = lent if share else load_model(model_path, config.train.dtype).to("cuda" if torch.cuda.is_available() else "cpu")
    assert model is not None
    weights = DecoderWeights.from_module(model, share=share)
    engine = NativeEngine(
        model.config,
        weights,
        slots=config.rollout.slots,
        max_length=config.data.max_prompt_length + config.rollout.max_response_length,
        decode=decode,
        kv_memory_fraction=config.rollout.kv_memory_fraction,
    )
    return RolloutService(engine, merged)
