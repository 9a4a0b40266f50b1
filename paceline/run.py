"""From a configuration to a finished run: build the parts in order, run the loop, leave a folder behind.

Everything that can be refused is refused before the first worker starts.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

from paceline.config import RunConfig, check_trainable
from paceline.control import Command, Control
from paceline.data.chat import stop_token_ids
from paceline.data.prompts import PromptSource
from paceline.inputs import Inputs, load_inputs
from paceline.loop import Loop, LoopSettings, Observer
from paceline.observe.recorder import Recorder, write_json
from paceline.observe.samples import Samples
from paceline.queue.admission import Admission
from paceline.queue.ledger import Ledger
from paceline.queue.message_queue import MessageQueue
from paceline.remote.host import peak_memory
from paceline.remote.worker import Worker
from paceline.reward.model import ModelReward
from paceline.reward.reward import BuiltinReward, Reward, RewardFunction, open_reward
from paceline.rollout.client import EngineClient
from paceline.rollout.environment import Environment, MakeEnvironment, open_environment
from paceline.rollout.fleet import Fleet
from paceline.rollout.rollouter import Rollouter
from paceline.run_dir import (
    disk_explained,
    find_start,
    finished_summary,
    log_file,
    move_aside,
    open_folder,
)
from paceline.suspend import ignore_suspended_time
from paceline.sync.connect import connect
from paceline.sync.transport import InPlace, WeightTransport
from paceline.synchronizer import ParameterSynchronizer
from paceline.train.checkpoint import read_state, save_checkpoint
from paceline.train.trainer import Trainer
from paceline.types import Role, Sampling
from paceline.workers.cluster import Cluster, PlannedWorker
from paceline.workers.fit import plan_that_fits
from paceline.workers.pools import open_workers, start_worker, unique_workers

log = logging.getLogger(__name__)

T = TypeVar("T")
FINAL_STATS_TIMEOUT_S = 10.0  # for workers to give their last figures


async def train(
    config: RunConfig,
    make_display: Callable[[int], Observer] | None = None,
    *,
    fresh: bool = False,
    reward: RewardFunction | None = None,
    environment: MakeEnvironment | None = None,
) -> dict[str, Any]:
    """Run to the last step and return the summary. `make_display(first_step)` makes the observer of every step.

    `fresh`: what is in the run folder is moved aside, once everything else is known to be right. `reward` (a function of answer and
    row, async or not) and `environment` (made for the tokenizer) are those of the program that calls, instead of the settings'.
    """
    ignore_suspended_time(asyncio.get_running_loop())
    check_trainable(config)
    inputs = load_inputs(config)
    agent = open_environment(environment or config.rollout.environment, inputs.tokenizer)
    folder = Path(config.run_dir)
    for warning in (await plan_that_fits(config, inputs.model_path))[2]:
        log.warning("%s", warning)
    async with AsyncExitStack() as stack:
        stack.enter_context(disk_explained(folder))
        scorer = await open_scorer(stack, config, inputs, reward)
        if fresh and (aside := move_aside(folder)):
            log.warning("the run that was in %s is now in %s", folder, aside)
        stack.enter_context(open_folder(config))
        start = find_start(config, inputs.identity)
        if start.step >= config.steps and (finished := finished_summary(folder, start.step)):
            return finished
        stack.enter_context(log_file(folder / "logs"))
        control = await stack.enter_async_context(Control(folder))
        (folder / "config.json").write_text(json.dumps(inputs.identity["config"], indent=1))

        cluster, plans, workers = await open_workers(
            stack, config, inputs.model_path, folder / "logs"
        )
        scorer = scorer or ModelReward(
            workers[Role.REWARD][0], config.data.prompt_key, config.data.system
        )
        actor, critic, ref = (
            next(iter(workers[role]), None) for role in (Role.ACTOR, Role.CRITIC, Role.REF)
        )
        assert actor is not None, "every run has an actor"
        trainer = Trainer(
            actor,
            config.algorithm,
            config.step_timeout_s,
            critic,
            ref,
            config.rollout.max_response_length,
            config.mismatch_limit,
        )
        if start.checkpoint:
            await _restore(start.checkpoint, trainer, inputs.source)
        fleet = make_fleet(config, cluster, plans, workers[Role.ROLLOUT])
        stack.push_async_callback(fleet.close)
        rollouter = make_rollouter(config, inputs, fleet, agent, scorer)
        shares_weights = (
            config.shares_weights and config.schedule.max_staleness > 0
        )  # else nothing is generated while training
        transport = await _transport(config, workers)
        synchronizer = ParameterSynchronizer(
            transport, fleet, rollouter, config.schedule.on_sync, config.sync, shares_weights
        )
        await synchronizer.sync_weights(
            start.step
        )  # engines serve the checkpoint's weights, and the path is known to work

        answers = Samples(folder, config.save_samples, start.step)
        # only now are the books cut to what the checkpoint says: a start that fails changes nothing
        ledger = Ledger(folder / "ledger.jsonl", start.ledger)
        stack.callback(ledger.close)
        recorder = Recorder(
            folder,
            start.metrics_length,
            answers,
            make_display(start.step) if make_display else None,
        )
        stack.callback(recorder.close)

        loop = Loop(
            _loop_settings(config),
            source=inputs.source,
            rollouter=rollouter,
            fleet=fleet,
            queue=MessageQueue(
                config.max_queue_size, config.schedule.max_staleness, changed=fleet.changed
            ),
            admission=Admission(
                config.schedule.capacity(config.groups_per_step),
                fleet.changed,
                config.max_queue_size,
            ),
            ledger=ledger,
            trainer=trainer,
            synchronizer=synchronizer,
            observer=recorder,
            save=lambda step: _save(config, step, inputs, trainer, ledger, recorder),
            guards=[
                (worker.name, worker.died)
                for worker in unique_workers(workers)
                if worker not in fleet.elastic
            ],
        )
        commands: dict[str, Command] = {
            "list": fleet.describe,
            "add": fleet.add,
            "remove": fleet.remove,
        }
        commands |= {"pause": rollouter.pause_rollout, "resume": rollouter.resume_rollout}
        async with control.serving(commands):
            await loop.run(start.step)
        peak = await _final_stats(recorder, fleet, set(unique_workers(workers)))
        summary = recorder.summary(
            sync_s=synchronizer.seconds, ledger=ledger.counts(), memory_peak_bytes=peak
        )
        summary["fleet"] = {"replaced": fleet.replaced, "fenced_messages": fleet.fenced_messages}
        write_json(folder / "summary.json", summary)
        return summary


async def open_scorer(
    stack: AsyncExitStack, config: RunConfig, inputs: Inputs, own: RewardFunction | None = None
) -> Reward | None:
    """What scores answers, tried on the data; None: a reward model does, in a worker of its own."""
    if config.reward.model and not own:
        return None
    scorer = await open_reward(config.reward, config.data.task, own)
    stack.push_async_callback(scorer.close)
    if isinstance(scorer, BuiltinReward):
        scorer.check(inputs.source.rows())
    return scorer


async def _save(
    config: RunConfig,
    step: int,
    inputs: Inputs,
    trainer: Trainer,
    ledger: Ledger,
    recorder: Recorder,
) -> None:
    async def write(target: Path) -> None:
        await trainer.save(target)
        inputs.tokenizer.save_pretrained(
            target / Role.ACTOR
        )  # so that the folder is a model like any other
        inputs.generation.to_json_file(target / Role.ACTOR / "generation_config.json")

    state = {
        "step": step,
        "ledger": ledger.state().to_json(),
        "metrics_length": recorder.length,
        **inputs.identity,
    }
    state |= {"source": inputs.source.state(), "trainer": trainer.state()}
    await save_checkpoint(
        Path(config.run_dir) / "checkpoints", step, state, write, config.keep_checkpoints
    )


async def _restore(checkpoint: Path, trainer: Trainer, source: PromptSource) -> None:
    await trainer.load(checkpoint)
    state = read_state(checkpoint)
    source.load_state(state["source"])
    trainer.load_state(state["trainer"])


async def _final_stats(recorder: Recorder, fleet: Fleet, workers: set[Worker]) -> int:
    """What the engines have done in all, for the record; the most memory that all together had."""
    recorder.record_final_stats(
        await _answers([member.engine.stats() for member in fleet.in_rotation])
    )
    living = workers - fleet.elastic | {member.engine.worker for member in fleet.in_rotation}
    return peak_memory() + sum(await _answers([worker.peak_memory() for worker in living]))


async def _answers(questions: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What those say who still answer: the run is over, and nobody is waited for any more."""
    answers = await asyncio.gather(
        *(asyncio.wait_for(question, FINAL_STATS_TIMEOUT_S) for question in questions),
        return_exceptions=True,
    )
    return [answer for answer in answers if not isinstance(answer, BaseException)]


def make_fleet(
    config: RunConfig, cluster: Cluster, plans: Sequence[PlannedWorker], workers: Sequence[Worker]
) -> Fleet:
    """The engines. Those in a worker of their own can be replaced, and more can join them."""
    by_name = {plan.name: plan for plan in plans}
    pool = config.placement.pool(Role.ROLLOUT)

    async def launch(name: str) -> EngineClient:
        plan = by_name.get(name) or PlannedWorker(
            name, (Role.ROLLOUT,), threads=plans[0].threads, pool=pool
        )
        return EngineClient(await start_worker(cluster, plan))

    return Fleet(
        [EngineClient(worker) for worker in workers],
        pool=pool,
        shared={plan.name for plan in plans if plan.roles != (Role.ROLLOUT,)},
        launch=None if config.placement.shared(Role.ACTOR, Role.ROLLOUT) else launch,
        heartbeat_timeout_s=config.heartbeat_timeout_s,
        loading_timeout_s=min(
            config.sync.timeout_s, 0.75 * config.rollout.generation_timeout
        ),  # before its answers fail for it
        max_restarts=config.fleet.max_restarts,
    )


def make_rollouter(
    config: RunConfig, inputs: Inputs, fleet: Fleet, agent: Environment, reward: Reward
) -> Rollouter:
    tokenizer, settings = inputs.tokenizer, config.rollout
    ends = stop_token_ids(tokenizer, inputs.generation)
    if not ends and not settings.stop:
        log.warning(
            "neither the model nor its tokenizer names an end token: every answer goes on to rollout.max_response_length"
        )
    sampling = Sampling(
        max_new_tokens=settings.max_response_length,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        stop_token_ids=ends,
        stop=settings.stop,
    )
    return Rollouter(
        fleet,
        agent,
        reward,
        sampling,
        group_size=config.group_size,
        min_group_size=settings.min_group_size,
        greedy_baseline=config.algorithm.needs_greedy_baseline,
        seed=config.seed,
        on_sync=config.schedule.on_sync,
        generation_timeout=settings.generation_timeout,
        hedge_after_s=config.fleet.hedge_after_s,
        slots=settings.slots,
    )


async def _transport(config: RunConfig, workers: dict[Role, list[Worker]]) -> WeightTransport:
    if config.in_place:
        return InPlace()
    actor, engines = workers[Role.ACTOR][0], workers[Role.ROLLOUT]
    return await connect(
        config.sync.transport, config.cluster == "local", actor, engines, config.train.dtype
    )


def _loop_settings(config: RunConfig) -> LoopSettings:
    return LoopSettings(
        steps=config.steps,
        groups_per_step=config.groups_per_step,
        sync_every=config.schedule.sync_every,
        save_every=config.save_every,
        max_failed_groups=config.rollout.max_failed_groups,
        dynamic_sampling=config.algorithm.dynamic_sampling,
        stall_timeout_s=config.stall_timeout_s,
        step_timeout_s=config.step_timeout_s,
    )
