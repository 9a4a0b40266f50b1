"""The public functions: train, steps, sft and evaluate, from Python objects to a result.

`import paceline` exports them lazily, so that it does not import torch.
"""

import asyncio
import os
import queue
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar, cast

from paceline.background import SIGNAL_INTERVAL_S, Background
from paceline.config import RunConfig, load_config
from paceline.data.files import is_data_file
from paceline.data.tasks import TASKS
from paceline.errors import ConfigError
from paceline.job import Job, Rows, Run, Step
from paceline.supervised.config import load_sft_config
from paceline.supervised.job import SftJob

if TYPE_CHECKING:
    from paceline.reward.reward import Reward, RewardFunction
    from paceline.rollout.environment import MakeEnvironment

P = ParamSpec("P")
T = TypeVar("T")
Source: TypeAlias = Callable[..., Rows]  # called with the seed
Path_: TypeAlias = str | os.PathLike[str]
Data: TypeAlias = Path_ | Sequence[Path_] | Mapping[str, Any] | Rows | Source
RewardPart: TypeAlias = "str | RewardFunction"
Rewards: TypeAlias = (
    "RewardPart | Reward | Mapping[str, Any] | Sequence[RewardPart | tuple[RewardPart, float]]"
)

POLL_INTERVAL_S = 0.02  # of asynchronous iteration over steps
ORIGINS = ("task", "path", "source")
HUB_DATASET = re.compile(r"[\w.-]+/[\w.-]+(:[\w.\[\]%-]+)?")


def train(
    recipe: str | Path | RunConfig | None = None,
    *,
    model: str | Path | None = None,
    data: Data | None = None,
    evaluation_data: Data | None = None,
    reward: "Rewards | None" = None,
    steps: int | None = None,
    environment: "MakeEnvironment | None" = None,
    fresh: bool = False,
    resume_from: int | str | Path | None = None,
    display: bool = True,
    **settings: Any,
) -> Run:
    """Train a model and return the run.

    recipe: name or path of a recipe, or a configuration of `load_config`; default settings if None.
    model: local directory or Hugging Face model ID.
    data: path of a file, name of a task or of a hub dataset, or the rows: dicts, a
        `datasets.Dataset` or a data frame; or a function of the seed that returns them.
    evaluation_data: held-out prompts in the same forms, scored during training (`evaluation`).
    reward: function of (completion, row), async or not; name of a verifier; or a list of them, each
        alone or as (function, weight).
    environment: called with the tokenizer; makes the agent loop of a multi-turn run.
    fresh: start over; an earlier run in `run_dir` is moved aside instead of resumed.
    resume_from: earlier step of the run, or the directory of another run's checkpoint, to start
        from; by default a run resumes from its last checkpoint.
    display: show progress on the console.
    settings: any other setting, as `rollout={"max_response_length": 256}` or by its dotted name.

    Raise PacelineError for wrong settings, data or user code.
    """
    job = _job(recipe, model, data, reward, steps, environment, settings, evaluation_data)
    return job.train(fresh, display, start_from=_start(resume_from)).result()


async def train_async(
    recipe: str | Path | RunConfig | None = None,
    *,
    model: str | Path | None = None,
    data: Data | None = None,
    evaluation_data: Data | None = None,
    reward: "Rewards | None" = None,
    steps: int | None = None,
    environment: "MakeEnvironment | None" = None,
    fresh: bool = False,
    resume_from: int | str | Path | None = None,
    display: bool = True,
    **settings: Any,
) -> Run:
    """Train like `train`, while the event loop of the caller continues."""
    job = _job(recipe, model, data, reward, steps, environment, settings, evaluation_data)
    return await _end_of(job.train, fresh, display, start_from=_start(resume_from))


def steps(
    recipe: str | Path | RunConfig | None = None,
    *,
    model: str | Path | None = None,
    data: Data | None = None,
    evaluation_data: Data | None = None,
    reward: "Rewards | None" = None,
    steps: int | None = None,
    environment: "MakeEnvironment | None" = None,
    fresh: bool = False,
    resume_from: int | str | Path | None = None,
    display: bool = False,
    **settings: Any,
) -> "Steps":
    """Train like `train` and yield each step, with `for` or `async for`.

    The run does not wait for the caller. It stops after the current step, with a checkpoint, when
    `stop` is called or the iterator is deleted, as after `break`.
    """
    job = _job(recipe, model, data, reward, steps, environment, settings, evaluation_data)
    return Steps(job, fresh, display, _start(resume_from))


class Steps:
    """Iterator over the steps of a run that is in progress."""

    def __init__(self, job: Job, fresh: bool, display: bool, start_from: str | None = None) -> None:
        self._stop, self._ended = asyncio.Event(), False
        arrived: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self._arrived = arrived
        self._run = job.train(fresh, display, arrived.put, self._stop, start_from)
        # The callback must not refer to this object, or it would never be deleted.
        self._run.when_done(lambda: arrived.put(None))

    def stop(self) -> Run:
        """Stop after the current step, with a checkpoint, and return the run."""
        self._run.end(self._stop.set)
        return self._run.result()

    @property
    def run(self) -> Run:
        """The run after its end; waits for it."""
        return self._run.result()

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        try:
            step = None if self._ended else self._next_step()
        except KeyboardInterrupt:
            self._run.interrupt()
            raise
        if step is None:
            self._ended = True
            self._run.result()  # raises the error that ended the run
            raise StopIteration
        return step

    def _next_step(self) -> Step | None:
        while True:
            with suppress(queue.Empty):
                return self._arrived.get(timeout=SIGNAL_INTERVAL_S)

    def __aiter__(self) -> AsyncIterator[Step]:
        return self

    async def __anext__(self) -> Step:
        # A thread that waits for a step would take it, and lose it if this call is cancelled.
        while not self._ended and self._arrived.empty():
            await asyncio.sleep(POLL_INTERVAL_S)
        step = next(self, None)
        if step is None:
            raise StopAsyncIteration
        return step

    def __del__(self) -> None:
        if hasattr(self, "_run"):  # otherwise it did not start
            self._run.end(self._stop.set)


def evaluate(
    recipe: str | Path | RunConfig | None = None,
    *,
    model: str | Path | None = None,
    data: Data | None = None,
    reward: "Rewards | None" = None,
    samples: int = 1,
    environment: "MakeEnvironment | None" = None,
    **settings: Any,
) -> dict[str, Any]:
    """Score a model on every row of the data, without training it.

    samples: completions per prompt; 1 is greedy unless rollout.top_p or rollout.top_k is set.
    """
    job = _job(recipe, model, data, reward, None, environment, settings)
    return job.evaluate(samples).result()


async def evaluate_async(
    recipe: str | Path | RunConfig | None = None,
    *,
    model: str | Path | None = None,
    data: Data | None = None,
    reward: "Rewards | None" = None,
    samples: int = 1,
    environment: "MakeEnvironment | None" = None,
    **settings: Any,
) -> dict[str, Any]:
    """Score like `evaluate`, while the event loop of the caller continues."""
    job = _job(recipe, model, data, reward, None, environment, settings)
    return await _end_of(job.evaluate, samples)


def sft(
    recipe: str | Path | None = None,
    *,
    model: str | Path | None = None,
    data: Data | None = None,
    validation: Data | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    fresh: bool = False,
    resume_from: int | str | Path | None = None,
    display: bool = True,
    **settings: Any,
) -> Run:
    """Fine-tune a model on completions and return the run. Its `checkpoint` is a model for `train`.

    data: path of a file, name of a hub dataset or of a task, or the rows: dicts with `prompt` and
        `completion`, or with chat `messages`; a `datasets.Dataset`; a function that returns rows.
    validation: held-out rows: a path, a hub dataset or the rows; or settings, as {"rows": 100}.
    resume_from: as in `train`.
    settings: any other setting of `paceline settings --sft`.
    """
    job = _sft_job(recipe, model, data, validation, steps, epochs, settings)
    return job.start(fresh, display, _start(resume_from)).result()


async def sft_async(
    recipe: str | Path | None = None,
    *,
    model: str | Path | None = None,
    data: Data | None = None,
    validation: Data | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    fresh: bool = False,
    resume_from: int | str | Path | None = None,
    display: bool = True,
    **settings: Any,
) -> Run:
    """Fine-tune like `sft`, while the event loop of the caller continues."""
    job = _sft_job(recipe, model, data, validation, steps, epochs, settings)
    return await _end_of(job.start, fresh, display, _start(resume_from))


def _start(resume_from: int | str | Path | None) -> str | None:
    if isinstance(resume_from, bool):
        raise ConfigError(
            f"resume_from = {resume_from}; expected a step or the directory of a checkpoint. "
            "Without it, a run resumes from its last checkpoint; fresh=True starts over"
        )
    return None if resume_from is None else str(resume_from)


async def _end_of(start: Callable[P, Background[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Start a job in a thread, because that imports torch, and wait for its result."""
    return await (await asyncio.to_thread(start, *args, **kwargs)).wait()


def _sft_job(
    recipe: str | Path | None,
    model: str | Path | None,
    data: Data | None,
    validation: Data | None,
    steps: int | None,
    epochs: int | None,
    settings: Mapping[str, Any],
) -> SftJob:
    values = _values(settings, model=_model_name(model), steps=steps, epochs=epochs)
    rows = _select_data(data, values)
    held_out = _select_validation(validation, values)
    return SftJob(load_sft_config(recipe, values=values), rows, held_out)


def _select_validation(validation: Data | None, values: dict[str, Any]) -> Rows | None:
    """Add the settings that `validation` means; return its rows if it has them itself."""
    if isinstance(validation, Mapping):
        values["validation"] = validation
        return None
    meant: dict[str, Any] = {}
    rows = _select_data(validation, meant)
    if meant.get("data.source") or meant.get("data.task"):
        raise ConfigError(
            f"validation = {validation!r}: expected a path, a hub dataset, the rows, or settings "
            "such as {'rows': 100}"
        )
    values |= {f"validation{name.removeprefix('data')}": v for name, v in meant.items() if v}
    return rows


def _job(
    recipe: str | Path | RunConfig | None,
    model: str | Path | None,
    data: Data | None,
    reward: "Rewards | None",
    steps: int | None,
    environment: "MakeEnvironment | None",
    settings: Mapping[str, Any],
    evaluation_data: Data | None = None,
) -> Job:
    values = _values(settings, model=_model_name(model), steps=steps)
    rows = _select_data(data, values)
    held_out = _select_data(evaluation_data, values, "evaluation")
    function = _select_reward(reward, values)
    if isinstance(recipe, RunConfig):
        if added := [name for name, value in values.items() if value is not None]:
            raise ConfigError(
                f"{', '.join(added)}: settings cannot be added to a complete configuration; "
                "pass them to paceline.load_config, or pass a recipe instead"
            )
        return Job(recipe, rows, held_out, function, environment)
    return Job(load_config(recipe, values=values), rows, held_out, function, environment)


def _values(settings: Mapping[str, Any], **given: Any) -> dict[str, Any]:
    """Return the settings of a call together with its arguments that are given."""
    return dict(settings) | {name: value for name, value in given.items() if value is not None}


def _model_name(model: Any) -> str | None:
    if model is None or isinstance(model, str | os.PathLike):
        return model if model is None else os.fspath(model)
    if isinstance(model, Run):
        raise ConfigError(f"model is a Run; pass its checkpoint, which is {model.checkpoint}")
    raise ConfigError(
        f"model is an object of the class {type(model).__name__}; expected a directory or a "
        "Hugging Face model ID. Save a loaded model and its tokenizer to one directory with "
        "save_pretrained, and pass the directory"
    )


def _select_data(data: Data | None, values: dict[str, Any], section: str = "data") -> Rows | None:
    """Add the settings that `data` means; return its rows if it has them itself."""
    if data is None:
        return None
    if isinstance(data, Mapping) and not hasattr(data, "num_rows"):  # which a DatasetDict has
        _check_section(data, section)
        values[section] = data
        return None
    if _are_files(data):
        values[f"{section}.path"] = [os.fspath(name) for name in cast("Sequence[str]", data)]
        return None
    of_recipe = {f"{section}.{name}": None for name in ORIGINS}  # which rows replace
    if not isinstance(data, str | os.PathLike):
        values |= of_recipe
        if not isinstance(data, Iterable) and callable(data):
            values[f"{section}.source"] = data
            return None
        return cast("Rows", data)  # a DatasetDict is rejected when its rows are read
    name = os.fspath(data)
    if name.partition(":")[0] in TASKS:
        values[f"{section}.task"] = name
    elif HUB_DATASET.fullmatch(name) and not Path(name).exists() and not is_data_file(Path(name)):
        from paceline.data.hub import load_hub_dataset

        values |= of_recipe
        return load_hub_dataset(name)
    else:
        values[f"{section}.path"] = name
    return None


def _check_section(data: Mapping[Any, Any], section: str) -> None:
    """Raise ConfigError for a row, or for columns, in place of settings of the section."""
    from paceline.data.rows import LIKELY_PROMPT_KEYS

    if found := [name for name in LIKELY_PROMPT_KEYS if name in data]:
        raise ConfigError(
            f"{section} is a dict with {', '.join(map(repr, found))}: expected settings of the "
            f"section {section}, or rows as a list of dicts: [{{'prompt': ...}}, ...]"
        )


def _are_files(data: Any) -> bool:
    """Return whether data is a list with names of files or patterns."""
    return (
        isinstance(data, list | tuple)
        and bool(data)
        and all(isinstance(name, str | os.PathLike) and is_data_file(Path(name)) for name in data)
    )


def _select_reward(reward: "Rewards | None", values: dict[str, Any]) -> Any:
    """Add the settings that `reward` means; return what scores if the program gives it itself."""
    if isinstance(reward, str):
        values["reward.function"] = reward
    elif isinstance(reward, Mapping):
        values["reward"] = reward
    elif isinstance(reward, Sequence):
        pairs = [part if isinstance(part, tuple) else (part, 1.0) for part in reward]
        if any(isinstance(part, tuple) for part in reward):
            values["reward.weights"] = [weight for _, weight in pairs]
        values |= {"reward.function": None, "reward.model": None}  # of the recipe
        return [function for function, _ in pairs]
    else:
        return reward
    return None
