"""GRPOTrainer with TRL's arguments, methods and attributes, over a run of Paceline."""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import paceline
from paceline.collection import collection_paused
from paceline.early_checks import check_model_name, first_given_rows
from paceline.errors import ConfigError
from paceline.observe.completions import print_completions
from paceline.printable import printable
from paceline.trl import translate, unsupported
from paceline.trl.callbacks import Callbacks
from paceline.trl.config import UPLOAD, GRPOConfig
from paceline.trl.history import History, Pending, TrainerState, TrainOutput
from paceline.trl.model import (
    longest_prompt,
    lora_settings,
    model_directory,
    model_name,
    uses_chat,
)
from paceline.trl.reward import (
    ColumnReward,
    RewardModelFunction,
    check_arguments,
    name_functions,
    weights_of,
)
from paceline.trl.rows import Row, check_columns, dataset_rows
from paceline.types import Group, Role

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from paceline.api import Steps

RewardFunc = str | Callable[..., Any]


class GRPOTrainer:
    """Trains a model with GRPO. Arguments are those of TRL's class, in the same order."""

    def __init__(
        self,
        model: "str | PreTrainedModel",
        reward_funcs: RewardFunc | list[RewardFunc] | None = None,
        args: GRPOConfig | None = None,
        train_dataset: Iterable[Row] | None = None,
        eval_dataset: Iterable[Row] | Mapping[str, Iterable[Row]] | None = None,
        processing_class: "PreTrainedTokenizerBase | None" = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ) -> None:
        """Raise ConfigError for anything that cannot be honored."""
        unsupported.check_arguments(locals())
        unsupported.check_subclass(type(self), GRPOTrainer)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                "WORLD_SIZE is above 1: Paceline starts its processes itself; run the script as "
                "one process, with paceline={'train.backend': 'fsdp', 'placement.train_ranks': N}"
            )
        if not isinstance(args, GRPOConfig | None):
            raise ConfigError(
                f"args is {type(args).__module__}.{type(args).__name__}; expected a GRPOConfig of "
                "paceline.trl"
            )
        self.args = args or GRPOConfig(f"{model_name(model)}-GRPO")
        self.state = TrainerState()
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.reward_funcs = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        self.accelerator = one_process()
        self._given_model, self._tokenizer = model, processing_class
        self._lora = lora_settings(peft_config) if peft_config is not None else {}
        self._pending = Pending()
        self._functions, self._reward_settings = self._select_rewards()
        self._model_path: str | None = None
        self._checkpoint: Path | None = None  # the trained model
        self._loaded: tuple[str, Any] | None = None
        self._check_names()
        with collection_paused():  # imports torch
            translate.settings(self.args, translate.plan(self.args, 1))  # to report mistakes early
        self._callbacks = Callbacks(callbacks or [], self.args, self.state)

    def _check_names(self) -> None:
        """Report a wrong model or column before torch is imported."""
        for name in ("train_dataset", "eval_dataset"):
            for row in first_given_rows(getattr(self, name), 1):
                check_columns(row, name)
        if isinstance(self._given_model, str | Path):
            check_model_name(str(self._given_model))
        for function in self.reward_funcs:
            if isinstance(function, str):
                check_model_name(function, "reward_funcs")

    # -- TRL's methods

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train to the last step.

        Without `resume_from_checkpoint`, an earlier run in output_dir is moved aside.
        """
        resumed = self._check_resume(resume_from_checkpoint)
        rows, plan = self._training_rows()
        history = History(self.args, plan, list(self._functions), self._pending)
        history.begin(self.state)
        held_out = self._held_out()
        check_arguments(self._functions, rows)
        check_arguments(self._functions, held_out or rows)
        self._callbacks.fire("on_train_begin")
        steps = paceline.steps(
            data=rows,
            evaluation_data=held_out,
            reward=self._reward(),
            fresh=not resumed and _has_run(self._output_dir),
            display=not self.args.disable_tqdm,
            **self._settings(plan, [*rows, *(held_out or ())]),
        )
        try:
            self._watch(steps, history, plan)
        except BaseException as error:
            self._interrupt(steps, error)
            raise
        run = steps.run
        self._checkpoint = run.checkpoint
        self.state.global_step = run.summary["steps"] * plan.updates
        self._log_evaluation(run.summary.get("evaluation", {}).get("last"), plan)
        output = history.finish(self.state)
        self._callbacks.fire("on_train_end")
        return output

    def _watch(self, steps: "Steps", history: History, plan: translate.Plan) -> None:
        """Log the steps of the run and call the callbacks."""
        for step in steps:
            entry = history.add(self.state, step)
            self._callbacks.fire("on_step_end")
            evaluated = {
                name.removeprefix("evaluation/"): value
                for name, value in step.metrics.items()
                if name.startswith("evaluation/")
            }
            self._log_evaluation(evaluated, plan)
            if entry is not None:
                if self.args.log_completions:
                    self._print_completions(step.groups)
                self._callbacks.fire("on_log", logs=dict(entry))
            if self._callbacks.stop_requested:
                steps.stop()

    def _interrupt(self, steps: "Steps", error: BaseException) -> None:
        """Keep what was trained before an error: its last checkpoint becomes the model."""
        if not isinstance(error, KeyboardInterrupt):  # which has ended the run
            with suppress(Exception):
                steps.stop()
        saved = sorted((self._output_dir / "checkpoints").glob("step_*"))
        if saved and self.state.global_step > 0:
            self._checkpoint = saved[-1] / Role.ACTOR

    def evaluate(
        self, eval_dataset: Iterable[Row] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Score the model on `eval_dataset`, with num_generations_eval completions per prompt."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None or isinstance(dataset, Mapping):
            raise ConfigError(
                "evaluate() needs one eval_dataset; pass it to GRPOTrainer or to evaluate()"
            )
        args, rows = self.args, dataset_rows(dataset)
        settings = self._settings(translate.plan(args, len(rows)), rows)
        settings["model"] = str(self._checkpoint or settings["model"])
        found = paceline.evaluate(
            data=rows,
            reward=self._reward(),
            samples=args.num_generations_eval or args.num_generations,
            **{name: value for name, value in settings.items() if not name.startswith("train.")},
        )
        metrics = self._evaluation_metrics(found, f"{metric_key_prefix}_")
        self.state.log_history.append(metrics | {"step": self.state.global_step})
        return metrics

    def add_callback(self, callback: Any) -> None:
        self._callbacks.add(callback)

    def remove_callback(self, callback: Any) -> None:
        self._callbacks.remove(callback)

    def is_world_process_zero(self) -> bool:
        return True

    is_local_process_zero = is_world_process_zero

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Copy the trained model, with its tokenizer, to a directory. Adapters are merged."""
        if self._checkpoint is None:
            raise ConfigError("save_model(): there is no trained model yet; call train() first")
        target = Path(output_dir or self.args.output_dir)
        unwanted = shutil.ignore_patterns("optimizer*")
        shutil.copytree(self._checkpoint, target, ignore=unwanted, dirs_exist_ok=True)

    def create_model_card(self, *_args: Any, **_fields: Any) -> None:
        """Copy the card of the trained model, which says how it was trained, to output_dir."""
        if self._checkpoint is None:
            raise ConfigError("create_model_card(): there is no trained model yet")
        shutil.copy(self._checkpoint / "README.md", self.args.output_dir)

    def push_to_hub(self, *_args: Any, **_fields: Any) -> None:
        raise ConfigError(f"push_to_hub() is not supported: {UPLOAD}")

    def save_state(self) -> None:
        """Write trainer_state.json, which has the log, to output_dir."""
        self._output_dir.mkdir(parents=True, exist_ok=True)
        self.state.save_to_json(self._output_dir / "trainer_state.json")

    def save_metrics(self, split: str, metrics: Mapping[str, float]) -> None:
        self._write(f"{split}_results.json", dict(metrics))

    def log_metrics(self, split: str, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            print(printable(f"  {split} {name} = {value}"))

    def _print_completions(self, groups: Sequence[Group]) -> None:
        limit = self.args.num_completions_to_print
        if limit is not None and limit <= 0:
            return
        most = 1 if self.args.log_unique_prompts else None  # of a prompt
        found = ((group, each) for group in groups for each in group.trajectories[:most])
        shown = islice(found, limit)
        print_completions(f"Step {self.state.global_step}", shown, list(self._functions))

    # -- TRL's attributes

    @property
    def model(self) -> "PreTrainedModel":
        """The model as last trained, loaded from its checkpoint."""
        from paceline.model.loading import load_model

        path = str(self._checkpoint or self._directory())
        if self._loaded is None or self._loaded[0] != path:
            self._loaded = path, load_model(path)
        return self._loaded[1]

    @property
    def processing_class(self) -> "PreTrainedTokenizerBase":
        """The model's tokenizer."""
        from paceline.model.loading import load_tokenizer

        return load_tokenizer(self._directory())

    # -- evaluation

    def _held_out(self) -> list[dict[str, Any]] | None:
        """Return the rows to evaluate on during training."""
        if self.args.eval_strategy == "no":
            return None
        if self.eval_dataset is None or isinstance(self.eval_dataset, Mapping):
            raise ConfigError(
                f"eval_strategy = {self.args.eval_strategy!r} needs one eval_dataset; pass it to "
                "GRPOTrainer"
            )
        return dataset_rows(self.eval_dataset)

    def _log_evaluation(self, found: Mapping[str, float] | None, plan: translate.Plan) -> None:
        """Add an evaluation to the log, unless it has it already."""
        if not found:
            return
        step = round(found["step"]) * plan.updates
        logged = {entry["step"] for entry in self.state.log_history if "eval_reward" in entry}
        if step not in logged:
            metrics = self._evaluation_metrics(found, "eval_")
            self.state.log_history.append(metrics | {"step": step})
            self._callbacks.fire("on_evaluate", metrics=metrics)
            self.state.note_best(self.args, metrics)

    def _evaluation_metrics(self, found: Mapping[str, float], prefix: str) -> dict[str, float]:
        metrics = {
            f"{prefix}reward": found["reward"],
            f"{prefix}completions/mean_length": found["tokens_mean"],
            f"{prefix}completions/clipped_ratio": found["truncated_fraction"],
        }
        for name in self._functions:
            if f"reward_component/{name}" in found:
                metrics[f"{prefix}rewards/{name}/mean"] = found[f"reward_component/{name}"]
        return metrics

    # -- what the run needs

    @property
    def _output_dir(self) -> Path:
        return Path(self.args.paceline.get("run_dir", self.args.output_dir))

    def _directory(self) -> str:
        if self._model_path is None:
            # Beside output_dir, because a run that starts over moves output_dir aside.
            target = self._output_dir.with_name(f"{self._output_dir.name}-initial-model")
            self._model_path = model_directory(self._given_model, self._tokenizer, target)
        return self._model_path

    def _select_rewards(self) -> tuple[dict[str, Callable[..., Any]], dict[str, Any]]:
        """Return the functions by name; or, for one reward model, its setting."""
        chosen = [function for function in self.reward_funcs if function is not None]
        if not chosen:
            raise ConfigError("GRPOTrainer: reward_funcs is missing; pass a function or a list")
        for function in chosen:
            if not isinstance(function, str) and not callable(function):
                raise ConfigError(f"reward_funcs: {function!r} is not a function or a model ID")
            if hasattr(function, "save_pretrained"):
                raise ConfigError(
                    "reward_funcs has a loaded model; pass its model ID or its directory"
                )
        if len(chosen) == 1 and isinstance(chosen[0], str) and not self.args.reward_weights:
            return {}, {"reward.model": chosen[0]}
        weights_of(self.args.reward_weights, len(chosen))  # to report mistakes early
        functions = [RewardModelFunction(f) if isinstance(f, str) else f for f in chosen]
        return name_functions(functions), {}

    def _reward(self) -> ColumnReward | None:
        if not self._functions:
            return None
        extras = {
            "trainer_state": self.state,
            "log_extra": self._pending.log_extra,
            "log_metric": self._pending.log_metric,
        }
        weights = weights_of(self.args.reward_weights, len(self._functions))
        timeout = self.args.paceline.get("reward.timeout_s", translate.GENEROUS["reward.timeout_s"])
        return ColumnReward(self._functions, weights, timeout, extras)

    def _training_rows(self) -> tuple[list[dict[str, Any]], translate.Plan]:
        if self.train_dataset is None:
            raise ConfigError("GRPOTrainer: train_dataset is missing")
        limit = None
        if not hasattr(self.train_dataset, "__len__"):
            if self.args.max_steps <= 0:
                raise ConfigError(
                    "max_steps is not set, and train_dataset has no length; set max_steps"
                )
            plan = translate.plan(self.args, 1)
            limit = plan.steps * plan.groups
        rows = dataset_rows(self.train_dataset, limit)
        return rows, translate.plan(self.args, len(rows))

    def _settings(self, plan: translate.Plan, rows: Sequence[Row]) -> dict[str, Any]:
        with collection_paused():  # imports transformers
            return self._collect_settings(plan, rows)

    def _collect_settings(self, plan: translate.Plan, rows: Sequence[Row]) -> dict[str, Any]:
        directory = self._directory()
        found = translate.settings(self.args, plan) | self._lora | self._reward_settings
        found |= {"model": directory, "data.chat": uses_chat(rows)}
        found.setdefault("data.max_prompt_length", longest_prompt(self.processing_class, rows))
        if self.args.use_cpu:
            _check_no_gpu()
        return found | self.args.paceline

    def _check_resume(self, checkpoint: str | bool | None) -> bool:
        """Return whether the run resumes; raise ConfigError if it cannot from there."""
        if not checkpoint:
            return False
        ours = sorted((self._output_dir / "checkpoints").glob("step_*"))
        if not ours:
            raise ConfigError(f"resume_from_checkpoint: no checkpoint in {self._output_dir}")
        if checkpoint is not True:
            allowed = {path.resolve() for path in (self._output_dir, ours[-1])}
            if Path(checkpoint).resolve() not in allowed:
                raise ConfigError(
                    f"resume_from_checkpoint = {checkpoint!r}: a run resumes from the last "
                    f"checkpoint in its output_dir, which is {ours[-1]}; pass True or that path"
                )
        return True

    def _write(self, name: str, values: Mapping[str, Any]) -> None:
        self._output_dir.mkdir(parents=True, exist_ok=True)
        (self._output_dir / name).write_text(json.dumps(dict(values), indent=2))


def one_process() -> SimpleNamespace:
    """Return what scripts use of an accelerator; the script is one process."""
    return SimpleNamespace(
        is_main_process=True,
        is_local_main_process=True,
        process_index=0,
        local_process_index=0,
        num_processes=1,
        print=print,
        wait_for_everyone=lambda: None,
        unwrap_model=lambda model, *_args, **_options: model,
    )


def _has_run(directory: Path) -> bool:
    return any((directory / name).exists() for name in ("metrics.jsonl", "checkpoints"))


def _check_no_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        raise ConfigError(
            "use_cpu = True, but a GPU is visible and Paceline would use it; start the script with "
            "CUDA_VISIBLE_DEVICES= (empty)"
        )
