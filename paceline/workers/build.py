"""Builds the parts of a worker, inside that worker: its roles decide what it loads.

If actor and rollout share a worker, the engine's weights are the trainer's parameters. With LoRA,
vLLM, placement.overlap or FP8 weights the engine has a copy. With LoRA, the reference model is the
actor without its adapters, unless there is a teacher. In a group of ranks, every rank has an engine
with a copy of the weights, which all ranks gather together; a reward model runs on rank 0.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch

from paceline.config import RunConfig
from paceline.data.tiny import resolve_model
from paceline.data.tiny_reward import resolve_reward_model
from paceline.heap import keep_freed_memory
from paceline.model.engine_weights import engine_weights
from paceline.model.fp8 import FP8
from paceline.model.fp8_weights import fp8_weights
from paceline.model.loading import default_device, load_config, load_model, load_tokenizer
from paceline.model.stored_weights import open_empty
from paceline.model.weights import EngineWeights
from paceline.remote.device_clock import DeviceClock
from paceline.remote.group import is_first_rank
from paceline.remote.parts import Parts
from paceline.reward.model import RewardModel
from paceline.rollout.native.engine import NativeEngine
from paceline.rollout.service import RolloutService
from paceline.rollout.tensor_parallel import Follower, InOrder, Team
from paceline.sync.transport import SOURCE, TARGET
from paceline.training.actor import Actor
from paceline.training.backends import open_actor, open_engine
from paceline.training.colocated import ColocatedEngine
from paceline.training.critic import Critic
from paceline.training.engine import TrainEngine
from paceline.training.lora import LoraDevice
from paceline.training.phases import Phases
from paceline.training.service import ActorService, CriticService, RefService
from paceline.training.single import SingleDevice
from paceline.types import Role
from paceline.workers.profiler import TorchProfiler

# Parts that the controller calls on all ranks of a group at once.
EVERY_RANK = {Role.ACTOR, Role.CRITIC, Role.REF, SOURCE}


def first_rank_only(roles: Sequence[Role]) -> frozenset[str]:
    """Return the parts of a group of ranks that rank 0 alone has, or answers for."""
    trains = {Role.ACTOR, Role.CRITIC, Role.REF} & set(roles)
    engine = set() if trains else {Role.ROLLOUT, TARGET}
    return frozenset({Role.REWARD, *engine})


def build_parts(roles: Sequence[Role], config: RunConfig, model_path: str, threads: int) -> Parts:
    concurrent = config.placement.overlap and {Role.ACTOR, Role.ROLLOUT} <= set(roles)
    torch.set_num_threads(max(1, threads // 2) if concurrent else threads)
    keep_freed_memory()
    parts: dict[str, Any] = {}
    actor: ActorService | None = None
    engine: TrainEngine | None = None
    generates = Role.ROLLOUT in roles
    phases = Phases() if generates and Role.ACTOR in roles and not concurrent else None
    if Role.ACTOR in roles:
        actor, engine = _actor(config, model_path, phases)
        parts |= {Role.ACTOR: actor, SOURCE: actor.weight_source}
    if Role.CRITIC in roles:
        parts[Role.CRITIC] = _critic(config, model_path, phases)
    if Role.REF in roles:
        parts[Role.REF] = _ref(config, model_path, engine, phases)
    if Role.REWARD in roles and is_first_rank():
        parts[Role.REWARD] = _reward(config)
    if generates:
        size = config.rollout.ranks
        team = Team(size) if size > 1 else None
        rollout = _rollout(config, model_path, actor, engine, team)
        if phases and config.releases_engines:
            phases.release_engine = rollout.release
        if team:
            before = rollout.await_call if isinstance(rollout, Follower) else team.post_call
            parts |= {name: InOrder(parts[name], before) for name in EVERY_RANK & parts.keys()}
        parts[Role.ROLLOUT] = rollout
        if isinstance(rollout, RolloutService):
            parts[TARGET] = rollout.weight_target
    if config.profile_steps:
        parts["profiler"] = TorchProfiler()
    return Parts(parts, {Role.ROLLOUT} if concurrent else (), DeviceClock(config.trace))


def _actor(
    config: RunConfig, model_path: str, phases: Phases | None
) -> tuple[ActorService, TrainEngine]:
    engine = open_actor(model_path, config.train, config.rollout.temperature, config.seed)
    longest = config.rollout.max_response_length
    actor = Actor(engine, config.algorithm, config.train, config.steps, longest)
    return ActorService(actor, config.train.offload, phases), engine


def _critic(config: RunConfig, model_path: str, phases: Phases | None) -> CriticService:
    engine = open_engine(model_path, config.train, config.rollout.temperature, "value")
    critic = Critic(engine, config.algorithm, config.train, config.steps)
    return CriticService(critic, config.train.offload, phases)


def _ref(
    config: RunConfig, model_path: str, actor: TrainEngine | None, phases: Phases | None
) -> RefService:
    if teacher := config.algorithm.teacher:
        path = resolve_model(teacher, config.data.task)
        engine = open_engine(path, config.train, config.rollout.temperature)
        size = load_config(path).get_text_config().vocab_size
        return RefService(engine, config.train.offload, phases=phases, vocabulary=size)
    if isinstance(actor, LoraDevice):
        return RefService(actor, config.train.offload, actor.adapters_off, phases)
    engine = open_engine(model_path, config.train, config.rollout.temperature)
    return RefService(engine, config.train.offload, phases=phases)


def _reward(config: RunConfig) -> Any:
    assert config.reward.model, "planned only if there is one"
    name = resolve_reward_model(config.reward.model)
    return RewardModel(name, config.train.dtype, config.train.micro_batch_tokens)


def _rollout(
    config: RunConfig,
    model_path: str,
    actor: ActorService | None,
    engine: TrainEngine | None,
    team: Team | None,
) -> RolloutService | Follower:
    """Open the engine, which shares weights with a single-device trainer in the same worker."""
    trainer = engine if isinstance(engine, SingleDevice) else None
    if config.rollout.engine == "vllm":
        return _vllm(config, model_path, actor, trainer, team)
    return _native(config, model_path, actor, engine, trainer)


def _native(
    config: RunConfig,
    model_path: str,
    actor: ActorService | None,
    trained: TrainEngine | None,
    trainer: SingleDevice | None,
) -> RolloutService:
    overlap, fp8 = config.placement.overlap, config.rollout.weight_dtype == "fp8"
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    weights = trainer.rollout_weights(longest, copy=overlap or fp8) if trainer else None
    # An engine with a copy of the weights loads new ones from the trainer.
    copies = trainer is not None and (weights is None or overlap or fp8)
    if weights is None and trained is not None and trainer is None:
        weights = _gathered(trained, model_path, config.train.dtype, longest)
    if weights is None:
        model = load_model(model_path, config.train.dtype).to(default_device())
        # In a rank of the trainer, the memory is released: a file mapped into memory cannot be.
        weights = engine_weights(model, share=actor is None, max_length=longest)
    engine = NativeEngine(
        load_config(model_path),
        fp8_weights(weights) if fp8 else weights,
        slots=config.slots,
        max_length=longest,
        decode=_decoder(model_path),
        kv_memory_fraction=config.rollout.kv_memory_fraction,
        kv_dtype=FP8 if config.rollout.kv_cache_dtype == "fp8" else None,
    )
    if actor is None:
        return RolloutService(engine)
    if trainer is None:
        return RolloutService(engine, gather=actor.gathering)
    release = engine.sleep if config.train.offload else engine.wait_idle
    prepare = engine.expect_sync if overlap else release
    if overlap:
        trainer.limit_launches()
    trainer.colocated.append(
        ColocatedEngine("KV cache of the rollout engine", engine.cache_bytes, prepare)
    )
    newest = trainer.current_weights
    return RolloutService(engine, (lambda: nullcontext(newest())) if copies else None)


def _gathered(
    trained: TrainEngine, model_path: str, dtype: str, longest: int
) -> EngineWeights | None:
    """Return a copy of the weights that all ranks gather, so that none reads the whole model.

    Returns None for files that only `load_model` reads.
    """
    model = open_empty(model_path, dtype, default_device())
    if model is None:
        return None
    weights = engine_weights(model, share=True, max_length=longest)
    weights.load(trained.export_weights())
    return weights


def _vllm(
    config: RunConfig,
    model_path: str,
    actor: ActorService | None,
    trainer: SingleDevice | None,
    team: Team | None,
) -> RolloutService | Follower:
    """Open vLLM, which has its own weight format: it copies the weights in the same worker too."""
    from paceline.rollout.vllm import VllmEngine
    from paceline.rollout.vllm_rank import VllmRank

    options: dict[str, Any] = {
        "settings": config.rollout.vllm,
        "dtype": config.train.dtype,
        "slots": config.slots,
        "max_length": config.data.max_prompt_length + config.rollout.max_response_length,
        "kv_memory_fraction": config.rollout.kv_memory_fraction,
        "kv_cache_dtype": config.rollout.kv_cache_dtype,
        "sleeps": config.train.offload and actor is not None,
        "team": team,
        "pipeline_parallel": config.rollout.pipeline_parallel,
    }
    gather = actor.gathering if actor else None
    if team and not team.leads:
        return Follower(VllmRank(model_path, **options), team, gather)
    engine = VllmEngine(model_path, **options, decode=_decoder(model_path))
    if actor is None or trainer is None:
        return RolloutService(engine, gather=team.ordered(gather) if team and gather else gather)
    release = engine.sleep if config.train.offload else None
    trainer.colocated.append(ColocatedEngine("vLLM", engine.held_bytes, release))
    return RolloutService(engine, lambda: actor.copying(trainer.named_weights))


def _decoder(model_path: str) -> Callable[[list[int]], str]:
    """Return what turns tokens into text. It loads the tokenizer for the first stop string."""
    tokenizer = cache(partial(load_tokenizer, model_path))

    def decode(tokens: list[int]) -> str:
        return str(tokenizer().decode(tokens))

    return decode
