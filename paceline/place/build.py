"""Builds the parts of a worker, inside that worker: which roles it plays decides what it loads.

Actor and rollout in one worker share memory: the engine's weights are the trainer's parameters.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.config import RunConfig
from paceline.types import Role


def build_parts(roles: Sequence[Role], config: RunConfig, model_path: str, threads: int) -> Mapping[str, Any]:
    import torch

    torch.set_num_threads(threads)
    parts: dict[str, Any] = {}
    actor_model = None
    if Role.ACTOR in roles:
        parts[Role.ACTOR], actor_model = _actor(config, model_path)
    if Role.CRITIC in roles:
        parts[Role.CRITIC] = _critic(config, model_path)
    if Role.REF in roles:
        parts[Role.REF] = _ref(config, model_path)
    if Role.ROLLOUT in roles:
        parts[Role.ROLLOUT] = _rollout(config, model_path, actor_model)
    return parts


def _actor(config: RunConfig, model_path: str) -> tuple[Any, Any]:
    from paceline.models import load_model
    from paceline.train.actor import Actor
    from paceline.train.service import ActorService
    from paceline.train.single import SingleDevice

    model = load_model(model_path)  # float32 whatever train.dtype says: that is the type of the products, not of what is learned
    engine = SingleDevice(model, config.train, temperature=config.rollout.temperature)
    return ActorService(Actor(engine, config.algorithm, config.train, config.steps, config.rollout.max_response_length)), model


def _critic(config: RunConfig, model_path: str) -> Any:
    from paceline.models import load_model
    from paceline.train.critic import Critic
    from paceline.train.service import CriticService

    return CriticService(Critic.build(load_model(model_path), config.algorithm, config.train, config.steps))


def _ref(config: RunConfig, model_path: str) -> Any:
    from paceline.models import load_model
    from paceline.train.service import RefService
    from paceline.train.single import SingleDevice

    return RefService(SingleDevice(load_model(model_path), config.train, temperature=config.rollout.temperature))


def _rollout(config: RunConfig, model_path: str, actor_model: Any) -> Any:
    from paceline.models import load_model, load_tokenizer
    from paceline.rollout.native.engine import NativeEngine
    from paceline.rollout.native.weights import DecoderWeights
    from paceline.rollout.service import RolloutService

    decode: Callable[[list[int]], str] | None = load_tokenizer(model_path).decode if config.rollout.stop else None
    model = actor_model if actor_model is not None else load_model(model_path, config.train.dtype)
    weights = DecoderWeights.from_module(model, share=actor_model is not None)
    engine = NativeEngine(
        model.config,
        weights,
        slots=config.rollout.slots,
        max_length=config.data.max_prompt_length + config.rollout.max_response_length,
        decode=decode,
    )
    return RolloutService(engine)
