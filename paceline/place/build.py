"""Builds the parts of a worker, inside that worker: which roles it plays decides what it loads.

Actor and rollout in one worker share memory: the engine's weights are the trainer's parameters. Under LoRA the two differ, so
the engine has a copy of its own, but the reference model is the actor's with its adapters off.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.config import RunConfig
from paceline.types import Role


def build_parts(roles: Sequence[Role], config: RunConfig, model_path: str, threads: int) -> Mapping[str, Any]:
    import torch

    torch.set_num_threads(threads)
    parts: dict[str, Any] = {}
    engine = None
    if Role.ACTOR in roles:
        parts[Role.ACTOR], engine = _actor(config, model_path)
    if Role.CRITIC in roles:
        parts[Role.CRITIC] = _critic(config, model_path)
    if Role.REF in roles:
        parts[Role.REF] = _ref(config, model_path, engine)
    if Role.REWARD in roles:
        parts[Role.REWARD] = _reward(config)
    if Role.ROLLOUT in roles:
        parts[Role.ROLLOUT] = _rollout(config, model_path, engine)
    return parts


def _actor(config: RunConfig, model_path: str) -> tuple[Any, Any]:
    from paceline.models import load_model
    from paceline.train.actor import Actor
    from paceline.train.lora import LoraDevice
    from paceline.train.service import ActorService
    from paceline.train.single import SingleDevice

    model = load_model(model_path)  # float32 whatever train.dtype says: that is the type of the products, not of what is learned
    temperature = config.rollout.temperature
    lora = config.train.lora is not None
    engine = LoraDevice(model, config.train, temperature, config.seed) if lora else SingleDevice(model, config.train, temperature)
    return ActorService(Actor(engine, config.algorithm, config.train, config.steps, config.rollout.max_response_length)), engine


def _critic(config: RunConfig, model_path: str) -> Any:
    from paceline.models import load_model
    from paceline.train.critic import Critic
    from paceline.train.service import CriticService

    return CriticService(Critic.build(load_model(model_path), config.algorithm, config.train, config.steps))


def _ref(config: RunConfig, model_path: str, actor: Any) -> Any:
    from paceline.models import load_model
    from paceline.train.lora import LoraDevice
    from paceline.train.service import RefService
    from paceline.train.single import SingleDevice

    if isinstance(actor, LoraDevice):
        return RefService(actor, actor.adapters_off)
    return RefService(SingleDevice(load_model(model_path), config.train, temperature=config.rollout.temperature))


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

    decode: Callable[[list[int]], str] | None = load_tokenizer(model_path).decode if config.rollout.stop else None
    merged = actor.merged_weights if isinstance(actor, LoraDevice) else None
    share = actor is not None and merged is None
    model = actor.model if share else load_model(model_path, config.train.dtype).to("cuda" if torch.cuda.is_available() else "cpu")
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
