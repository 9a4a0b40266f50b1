"""The generating half of a run, shared by training and evaluation: scorer, fleet and rollouter."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.collection import rare_collections
from paceline.config import RunConfig
from paceline.data.chat import stop_token_ids
from paceline.environment.conversation import Conversation
from paceline.environment.pool import EnvironmentPool
from paceline.environment.remote import Launch
from paceline.errors import ConfigError
from paceline.inputs import Inputs
from paceline.queue.message_queue import MessageQueue
from paceline.remote.child import Child
from paceline.remote.worker import Worker, mark_seen
from paceline.reward.judge import JudgeReward
from paceline.reward.model import ModelReward
from paceline.reward.pool import ProcessReward
from paceline.reward.returned import ReturnedReward
from paceline.reward.reward import (
    BuiltinReward,
    NoReward,
    Reward,
    Rewards,
    WeightedReward,
    open_reward,
    reward_processes,
)
from paceline.rollout.client import EngineClient
from paceline.rollout.environment import (
    AgentLoop,
    MakeEnvironment,
    gives_rewards,
    open_environment,
)
from paceline.rollout.fleet import Fleet
from paceline.rollout.in_flight import GroupInFlight, fresh_enough
from paceline.rollout.in_flight_files import read_in_flight, write_in_flight
from paceline.rollout.quarantine import Quarantine
from paceline.rollout.rollouter import Rollouter
from paceline.types import Role
from paceline.workers.cluster import Cluster, PlannedWorker
from paceline.workers.engines import engine_workers
from paceline.workers.pools import open_workers, start_worker

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Generation:
    workers: dict[Role, list[Worker]]
    fleet: Fleet
    rollouter: Rollouter
    scorer: Reward
    plans: Sequence[PlannedWorker] = ()
    gpu_name: str = ""
    environment_pool: EnvironmentPool | None = None

    def user_processes(self) -> Sequence[Child]:
        """Return the local processes that run the user's reward functions and environment."""
        environments = self.environment_pool.processes() if self.environment_pool else []
        here = [process for process in environments if isinstance(process, Child)]
        return [*reward_processes(self.scorer), *here]

    def living_workers(self) -> list[Worker]:
        """Return the workers that run now; replacements of engines included."""
        found = {id(worker): worker for workers in self.workers.values() for worker in workers}
        found |= {id(member.engine.worker): member.engine.worker for member in self.fleet}
        return [worker for worker in found.values() if not worker.died.done()]

    def in_flight(self, queue: MessageQueue) -> dict[int, GroupInFlight]:
        """Return the groups that are not trained yet, in the queue or unfinished."""
        queued = {group.seq: GroupInFlight.of(group) for group in queue.payloads()}
        return queued | self.rollouter.in_flight()

    @asynccontextmanager
    async def writing_in_flight(
        self, groups: dict[int, GroupInFlight], step: int, target: Path
    ) -> AsyncIterator[None]:
        """Write groups while the context runs, with the tokens that the engines have.

        Tokens of versions after `step` are left out: the weights of the checkpoint are older.
        """

        async def write() -> None:
            partials = await self.fleet.partials()
            known = {seq: group.up_to(step, partials) for seq, group in groups.items()}
            await asyncio.to_thread(write_in_flight, target, known)

        writing = asyncio.create_task(write()) if groups else None
        if writing:
            mark_seen(writing)  # if both fail, the error of the context counts
        try:
            yield
            if writing:
                await writing
        finally:
            if writing:
                writing.cancel()

    def restore_in_flight(
        self, config: RunConfig, checkpoint: Path, step: int, order: Sequence[int]
    ) -> None:
        """Continue the groups of a checkpoint that will not be too stale, trained in this order."""
        groups = fresh_enough(
            read_in_flight(checkpoint),
            order,
            step,
            config.groups_per_step,
            config.schedule.max_staleness,
        )
        self.rollouter.restore(groups)
        if groups:
            tokens = sum(group.num_tokens for group in groups.values())
            log.info("continuing %d groups in flight, with %d tokens", len(groups), tokens)


async def open_generation(
    stack: AsyncExitStack,
    config: RunConfig,
    roles: Sequence[Role],
    inputs: Inputs,
    environment: AgentLoop,
    scorer: Reward | None,
    logs: Path,
    quarantine: Path | None = None,
) -> Generation:
    """Start the workers of these roles and what generates with them. The stack closes everything.

    Without a `scorer`, the reward model among the workers scores. `quarantine`: file of the prompts
    on which engines died.
    """
    stack.enter_context(rare_collections())
    cluster, plans, workers = await open_workers(stack, config, roles, inputs.model_path, logs)
    if launch := cluster.launcher():
        await _start_pool(stack, environment, launch)
    fleet = _fleet(config, cluster, plans, workers[Role.ROLLOUT])
    stack.push_async_callback(fleet.close)
    if scorer is None:
        model = workers[Role.REWARD][0]
        scorer = ModelReward(model, config.data.prompt_key, config.data.system)
    if close := getattr(environment, "close", None):  # most agent loops hold nothing
        stack.push_async_callback(close)
    reward = scorer if config.rollout.agent is None else ReturnedReward(scorer)
    rollouter = _rollouter(config, inputs, fleet, environment, reward, Quarantine(quarantine))
    gpu_name = next((node.gpu_name for node in cluster.nodes() if node.gpu_name), "")
    pool = environment.pool if isinstance(environment, Conversation) else None
    return Generation(workers, fleet, rollouter, scorer, plans, gpu_name, pool)


def open_agent(
    config: RunConfig, inputs: Inputs, environment: MakeEnvironment | None = None
) -> AgentLoop:
    """Open the agent loop of the settings, or of the program's `environment`."""
    settings = config.rollout
    if settings.agent is not None:
        if environment is not None:
            raise ConfigError(
                f"rollout.agent = {settings.agent!r} contradicts the environment of the program; "
                "remove one of them"
            )
        from paceline.endpoint.agent import open_program  # needs the extra "agents"

        limits = settings.limits(config.data.max_prompt_length)
        return open_program(
            settings.agent, inputs.tokenizer, config.data, settings.sampling(()), limits
        )
    return open_environment(
        environment or config.rollout.environment,
        inputs.tokenizer,
        config.data,
        config.rollout.limits(config.data.max_prompt_length),
        config.rollout.tools,
        config.rollout.environment_args,
        config.rollout.environment_workers,
        config.rollout.environment_pass_env,
    )


async def start_agent(stack: AsyncExitStack, config: RunConfig, agent: AgentLoop) -> None:
    """Start the workers of its environment, if it has any. The stack closes them.

    On Ray, `open_generation` starts them.
    """
    if config.cluster == "local":
        await _start_pool(stack, agent)


async def _start_pool(
    stack: AsyncExitStack, agent: AgentLoop, launch: Launch | None = None
) -> None:
    if isinstance(agent, Conversation) and agent.pool:
        stack.push_async_callback(agent.pool.close)
        await agent.pool.start(launch)


async def open_scorer(
    stack: AsyncExitStack,
    config: RunConfig,
    inputs: Inputs,
    reward: Rewards | None = None,
    agent: AgentLoop | None = None,
    run_dir: Path | None = None,
) -> Reward | None:
    """Open what scores completions and try it on the data; None: a reward model scores them.

    With the environment `agent`, no other reward is needed. `run_dir`: where scores are kept.
    """
    if config.reward.model and reward is None:
        return None
    given = reward is not None or config.reward.function or config.data.task
    plays = config.rollout.agent is not None or (agent is not None and gives_rewards(agent))
    if not given and (not config.algorithm.uses_rewards or plays):
        return NoReward()
    scorer = await open_reward(
        config.reward, config.data.task, reward, config.data.prompt_key, run_dir
    )
    stack.push_async_callback(scorer.close)
    if isinstance(scorer, BuiltinReward | ProcessReward | JudgeReward | WeightedReward):
        scorer.check(inputs.source.rows())
        if inputs.held_out is not None:
            scorer.check(inputs.held_out.rows())
    return scorer


def _fleet(
    config: RunConfig,
    cluster: Cluster,
    plans: Sequence[PlannedWorker],
    workers: Sequence[Worker],
) -> Fleet:
    """Make the fleet. Engines in a separate worker can be replaced, and more can join them."""
    by_name = {plan.name: plan for plan in plans}
    pool = config.placement.pool(Role.ROLLOUT)
    ranks = config.rollout.ranks if config.rollout.ranks > 1 else 0

    async def launch(name: str) -> EngineClient:
        plan = by_name.get(name) or PlannedWorker(
            name, (Role.ROLLOUT,), ranks, plans[0].threads, pool=pool
        )
        return EngineClient(await start_worker(cluster, plan, config.start_timeout_s))

    return Fleet(
        [EngineClient(worker) for worker in engine_workers(config, plans, workers)],
        pool=pool,
        shared={plan.name for plan in plans if plan.roles != (Role.ROLLOUT,)},
        launch=None if config.placement.shared(Role.ACTOR, Role.ROLLOUT) else launch,
        heartbeat_timeout_s=config.heartbeat_timeout_s,
        # Detect a worker that hangs while it loads before its completions time out.
        loading_timeout_s=min(config.sync.timeout_s, 0.75 * config.rollout.generation_timeout),
        max_restarts=config.fleet.max_restarts,
    )


def _rollouter(
    config: RunConfig,
    inputs: Inputs,
    fleet: Fleet,
    environment: AgentLoop,
    reward: Reward,
    quarantine: Quarantine,
) -> Rollouter:
    settings = config.rollout
    ends = stop_token_ids(inputs.tokenizer, inputs.generation)
    if not ends and not settings.stop:
        log.warning(
            "neither the model nor its tokenizer defines an end-of-sequence token: "
            "every completion runs to rollout.max_response_length"
        )
    return Rollouter(
        fleet,
        environment,
        reward,
        settings.sampling(ends),
        group_size=config.group_size,
        min_group_size=settings.min_group_size,
        greedy_baseline=config.algorithm.needs_greedy_baseline,
        seed=config.seed,
        on_sync=config.schedule.on_sync,
        generation_timeout=settings.generation_timeout,
        episode_timeout_s=settings.episode_timeout_s,
        hedge_after_s=config.fleet.hedge_after_s,
        slots=settings.slots,
        quarantine=quarantine,
    )
