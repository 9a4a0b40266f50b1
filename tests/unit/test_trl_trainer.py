"""GRPOTrainer: models and datasets as objects, resuming, callbacks, evaluation, rejections."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

import paceline.trl
from paceline.api import Steps
from paceline.errors import ConfigError, DataError, PacelineError
from paceline.job import Step
from paceline.trl import GRPOConfig, GRPOTrainer
from paceline.trl.callbacks import Callbacks
from paceline.trl.history import History, Pending, TrainerState
from paceline.trl.translate import plan
from paceline.types import Completion, Finish, Group, Prompt, Trajectory, Turn
from tests.audits import assert_consistent
from tests.models import random_model, random_reward_model

ROWS = [{"prompt": f"Count to {n}:", "answer": n} for n in range(6)]


def variety(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(len(set(ids)) + min(ids) / 100) for ids in completion_ids]


@pytest.fixture
def model(tmp_path: Path) -> str:
    return random_model(tmp_path / "model")


def make_trainer(tmp_path: Path, model: Any, **more: Any) -> GRPOTrainer:
    """Return a trainer; arguments that are not the trainer's are those of its configuration."""
    names = ("reward_funcs", "train_dataset", "eval_dataset", "callbacks", "processing_class")
    names += ("peft_config",)
    chosen = {name: more.pop(name) for name in names if name in more}
    fields = {"max_steps": 2, "max_completion_length": 6, "logging_steps": 1, "disable_tqdm": True}
    args = GRPOConfig(str(tmp_path / "out"), **fields | more)
    given = {"reward_funcs": variety, "train_dataset": ROWS} | chosen
    return GRPOTrainer(model, args=args, **given)


def test_log_has_names_of_trl(tmp_path: Path, model: str) -> None:
    trainer = make_trainer(tmp_path, model)
    output = trainer.train()
    assert output.global_step == 2
    assert output.metrics["train_loss"] == output.training_loss
    names = {"step", "epoch", "loss", "grad_norm", "learning_rate", "reward", "reward_std"}
    names |= {"entropy", "frac_reward_zero_std", "step_time", "clip_ratio/region_mean"}
    names |= {"rewards/variety/mean", "rewards/variety/std"}
    names |= {f"completions/{name}_length" for name in ("mean", "min", "max", "mean_terminated")}
    assert names <= trainer.state.log_history[0].keys()


def test_training_loss_is_mean_over_updates_that_are_not_skipped(tmp_path: Path) -> None:
    args = GRPOConfig(str(tmp_path))
    history, state = History(args, plan(args, rows=3), ["variety"], Pending()), TrainerState()
    history.begin(state)
    tokens = np.zeros(4, np.int32)
    turn = Turn((1,), Completion(tokens, tokens.astype(np.float32), tokens, Finish.STOP))
    group = Group(0, Prompt("q", (1,), "q", {}), (Trajectory((turn,), "", 1.0),) * 8, 0.0, 0.0)
    for number, loss in enumerate((1.0, math.nan, 3.0), 1):
        metrics = {"train/loss": loss, "rollout/tokens": 32.0}
        history.add(state, Step(number, 1.0, metrics, [group]))
    assert history.finish(state).training_loss == 2.0


@pytest.mark.parametrize(
    ("limits", "rows"),
    [({}, 8), ({"num_completions_to_print": 3}, 3), ({"log_unique_prompts": 1}, 1)],
)
def test_log_completions_prints_them_with_rewards(
    limits: dict[str, Any],
    rows: int,
    tmp_path: Path,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    trainer = make_trainer(tmp_path, model, max_steps=1, log_completions=True, **limits)
    trainer.train()
    printed = capsys.readouterr().out
    assert "Step 1" in printed and "variety" in printed
    assert printed.count("Count to") == rows


@pytest.mark.parametrize("limit", [0, -1])
def test_log_completions_prints_nothing_when_limit_is_not_positive(
    limit: int, tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {"log_completions": True, "num_completions_to_print": limit}
    assert make_trainer(tmp_path, model, max_steps=1, **fields).train().global_step == 1
    assert "Step 1" not in capsys.readouterr().out


def test_step_counts_optimizer_updates(tmp_path: Path, model: str) -> None:
    trainer = make_trainer(tmp_path, model, max_steps=4, steps_per_generation=2)
    assert trainer.train().global_step == 4
    assert [entry["step"] for entry in trainer.state.log_history] == [2, 4, 4]


def test_loaded_model_is_trained(tmp_path: Path, model: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer = make_trainer(
        tmp_path, loaded, processing_class=tokenizer, learning_rate=1e-3, bf16=False
    )
    trainer.train()
    before, after = loaded.state_dict(), trainer.model.state_dict()
    assert any(not before[name].equal(after[name]) for name in before)


def test_dataset_without_length_is_read_as_far_as_needed(tmp_path: Path, model: str) -> None:
    def endless() -> Any:
        while True:
            yield from ROWS

    assert make_trainer(tmp_path, model, train_dataset=endless()).train().global_step == 2


def test_train_starts_over_unless_it_resumes(tmp_path: Path, model: str) -> None:
    make_trainer(tmp_path, model).train()
    resumed = make_trainer(tmp_path, model, max_steps=3, lr_scheduler_type="constant")
    with pytest.raises(PacelineError, match="lr_schedule"):
        resumed.train(resume_from_checkpoint=True)
    again = make_trainer(tmp_path, model, max_steps=3)
    again.train(resume_from_checkpoint=True)
    assert [entry["step"] for entry in again.state.log_history] == [3, 3]
    again.train()
    assert [entry["step"] for entry in again.state.log_history] == [1, 2, 3, 3]


def test_resume_is_rejected_when_there_is_no_checkpoint(tmp_path: Path, model: str) -> None:
    with pytest.raises(ConfigError, match="no checkpoint in"):
        make_trainer(tmp_path, model).train(resume_from_checkpoint=True)


def test_callback_stops_run(tmp_path: Path, model: str) -> None:
    events: list[str] = []

    class Stop:
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            events.append("begin")

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            events.append(f"log {kwargs['logs']['step']}")
            control.should_training_stop = True

    trainer = make_trainer(tmp_path, model, max_steps=500, callbacks=[Stop()])
    assert trainer.train().global_step < 500
    assert events[:2] == ["begin", "log 1"]


def test_flag_without_effect_is_reported_once_per_callback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Saves:
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save = True

    class Evaluates:
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert not control.should_save
            control.should_evaluate = True

    callbacks = Callbacks([Saves(), Evaluates()], GRPOConfig(str(tmp_path)), TrainerState())
    for _ in range(2):
        callbacks.fire("on_step_end")
    assert [record.getMessage() for record in caplog.records] == [
        "callback Saves set control.should_save, which has no effect; set save_steps",
        "callback Evaluates set control.should_evaluate, which has no effect; "
        "set eval_strategy and eval_steps",
    ]
    assert not callbacks.stop_requested


@pytest.mark.parametrize(("better", "best"), [(None, 1.0), (False, 0.0)])
def test_early_stopping_callback_stops_the_run(
    better: bool | None, best: float, tmp_path: Path
) -> None:
    from transformers import EarlyStoppingCallback

    scores = iter([0.0, 1.0] if better is None else [1.0, 0.0])
    state = TrainerState()
    callback = EarlyStoppingCallback(early_stopping_patience=2)
    fields = {"metric_for_best_model": "reward", "eval_strategy": "steps"}
    args = GRPOConfig(str(tmp_path), greater_is_better=better, **fields)
    callbacks = Callbacks([callback], args, state)
    stopped = []
    for value in [*scores, 0.5, 0.5, 0.5]:
        callbacks.fire("on_evaluate", metrics={"eval_reward": value})
        state.note_best(args, {"eval_reward": value})
        stopped.append(callbacks.stop_requested)
    assert stopped == [False, False, False, True, True]
    assert state.best_metric == best


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_trained_model_can_be_saved_when_training_is_interrupted(
    error: type[BaseException], tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fail:
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if error is RuntimeError and state.global_step == 2:
                raise error

    def interrupted(self: Steps) -> Any:
        if error is KeyboardInterrupt and trainer.state.global_step == 2:
            raise error
        return next_step(self)

    next_step = Steps._next_step
    monkeypatch.setattr(Steps, "_next_step", interrupted)
    given = {"callbacks": [Fail()], "learning_rate": 1e-2, "bf16": False}
    trainer = make_trainer(tmp_path, model, max_steps=500, **given)
    with pytest.raises(error):
        trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    before = load_file(Path(model) / "model.safetensors")
    after = load_file(tmp_path / "saved" / "model.safetensors")
    assert any(not before[name].equal(after[name]) for name in before)
    assert_consistent(tmp_path / "out")
    steps = sum(1 for _ in (tmp_path / "out" / "metrics.jsonl").open())
    assert 2 <= steps < 100, "the run has ended"


def test_trainer_stops_early_when_evaluations_do_not_improve(tmp_path: Path, model: str) -> None:
    from transformers import EarlyStoppingCallback

    def same(completions: list[str], **kwargs: Any) -> list[float]:
        return [1.0] * len(completions)

    fields = {"metric_for_best_model": "eval_reward", "eval_strategy": "steps", "eval_steps": 1}
    callbacks, rows = [EarlyStoppingCallback(2)], ROWS[:1]
    given = {"reward_funcs": same, "callbacks": callbacks, "eval_dataset": rows}
    trainer = make_trainer(tmp_path, model, max_steps=500, **given, **fields)
    assert trainer.train().global_step < 100
    assert trainer.state.best_metric == 1.0


def test_callback_is_rejected_when_its_event_never_comes(tmp_path: Path, model: str) -> None:
    class Saves:
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...

    with pytest.raises(ConfigError, match="Saves implements on_save, which Paceline does not call"):
        make_trainer(tmp_path, model, callbacks=[Saves()])


class NeedsModel:
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        pass


def test_callback_is_rejected_when_it_needs_more_arguments(tmp_path: Path, model: str) -> None:
    with pytest.raises(ConfigError, match=r"NeedsModel\.on_step_end .*'model'; give other"):
        make_trainer(tmp_path, model, callbacks=[NeedsModel()])


def test_callback_may_have_attributes_with_names_like_events(tmp_path: Path) -> None:
    class Quiet:
        on_gpu, on_step_end = True, None

    Callbacks([Quiet()], GRPOConfig(str(tmp_path)), TrainerState()).fire("on_step_end")


class CountsSteps:
    steps = 0

    def on_step_end(self, *_: Any) -> None:
        self.steps += 1


def test_callback_is_called_when_it_is_added_later(tmp_path: Path, model: str) -> None:
    trainer, callback = make_trainer(tmp_path, model), CountsSteps()
    trainer.add_callback(callback)
    trainer.train()
    assert callback.steps == 2


def test_arguments_of_another_class_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"args is builtins\.dict; expected a GRPOConfig"):
        GRPOTrainer("model", variety, args={"max_steps": 1}, train_dataset=ROWS)  # type: ignore[arg-type]


def test_evaluate_scores_trained_model(tmp_path: Path, model: str) -> None:
    chosen = {"eval_dataset": ROWS[:2], "num_generations_eval": 2, "learning_rate": 0.1}
    trainer = make_trainer(tmp_path, model, **chosen)
    before = trainer.evaluate()
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_reward"] == metrics["eval_rewards/variety/mean"]
    assert metrics["eval_reward"] != before["eval_reward"]


def test_save_model_keeps_the_run_when_its_target_is_output_dir(tmp_path: Path, model: str) -> None:
    from transformers import AutoModelForCausalLM

    trainer = make_trainer(tmp_path, model)
    trainer.train()
    trainer.save_model()
    assert_consistent(tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.model_type == "qwen2"


def test_end_of_training_script_runs(tmp_path: Path, model: str) -> None:
    """What the scripts of TRL and Open R1 do after training."""
    trainer = make_trainer(tmp_path, model, callbacks=[Recorder])
    trainer.remove_callback(Recorder)
    result = trainer.train()
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert state["global_step"] == result.global_step and not Recorder.called
    trainer.accelerator.wait_for_everyone()
    assert trainer.accelerator.is_main_process and trainer.is_world_process_zero()
    trainer.create_model_card(dataset_name="x", tags=["y"])
    assert "GRPO" in (tmp_path / "out" / "README.md").read_text().upper()
    with pytest.raises(ConfigError, match="upload_folder"):
        trainer.push_to_hub(dataset_name="x")


class Recorder:
    called = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        Recorder.called = True


def test_reward_model_scores(tmp_path: Path, model: str) -> None:
    scorer = random_reward_model(tmp_path / "scorer")
    trainer = make_trainer(tmp_path, model, reward_funcs=scorer)
    trainer.train()
    assert "reward" in trainer.state.log_history[0]


def test_reward_model_scores_together_with_function(tmp_path: Path, model: str) -> None:
    scorer = random_reward_model(tmp_path / "scorer")
    trainer = make_trainer(tmp_path, model, reward_funcs=[scorer, variety])
    trainer.train()
    entry = trainer.state.log_history[0]
    parts = entry["rewards/scorer/mean"] + entry["rewards/variety/mean"]
    assert entry["reward"] == pytest.approx(parts, abs=1e-4)


def test_peft_config_trains_adapters(tmp_path: Path, model: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"])
    trainer = make_trainer(tmp_path, model, peft_config=config)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "adapter" / "adapter_model.safetensors").exists()


def test_peft_config_is_rejected_when_it_has_dropout(tmp_path: Path, model: str) -> None:
    peft = pytest.importorskip("peft")
    with pytest.raises(ConfigError, match=r"lora_dropout = 0.1 cannot be honored"):
        make_trainer(tmp_path, model, peft_config=peft.LoraConfig(lora_dropout=0.1))


def test_peft_config_is_rejected_when_its_alpha_is_no_whole_number(
    tmp_path: Path, model: str
) -> None:
    peft = pytest.importorskip("peft")
    with pytest.raises(ConfigError, match=r"lora_alpha = 3.5; expected a whole number"):
        make_trainer(tmp_path, model, peft_config=peft.LoraConfig(lora_alpha=3.5))


def test_tokenizer_of_another_model_is_rejected(tmp_path: Path, model: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "other"
    with pytest.raises(ConfigError, match="processing_class has another chat template"):
        make_trainer(tmp_path, model, processing_class=tokenizer).train()


def test_name_of_tokenizer_is_rejected_when_an_object_is_expected(
    tmp_path: Path, model: str
) -> None:
    with pytest.raises(ConfigError, match="processing_class is str; expected a tokenizer"):
        make_trainer(tmp_path, model, processing_class=model).train()


def test_reward_function_is_checked_before_the_model_is_saved(tmp_path: Path, model: str) -> None:
    from transformers import AutoModelForCausalLM

    def reference(completions: list[str], solution: list[str]) -> list[float]:
        return [1.0] * len(solution)

    loaded = AutoModelForCausalLM.from_pretrained(model)
    with pytest.raises(ConfigError, match=r"'solution'.* columns of the dataset: answer"):
        make_trainer(tmp_path, loaded, reward_funcs=reference).train()
    held_out = {"eval_dataset": ROWS[:1], "eval_strategy": "steps"}
    rows = [{**row, "solution": "4"} for row in ROWS]
    trainer = make_trainer(tmp_path, loaded, reward_funcs=reference, train_dataset=rows, **held_out)
    with pytest.raises(ConfigError, match="'solution'"):
        trainer.train()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_subclass_is_rejected_when_its_method_is_never_called(tmp_path: Path, model: str) -> None:
    class Custom(GRPOTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> float:
            return 0.0

    class Derived(Custom):
        def train(self, resume_from_checkpoint: str | bool | None = None) -> Any:
            return super().train(resume_from_checkpoint)

    with pytest.raises(ConfigError, match=r"Custom overrides compute_loss, .*'algorithm.loss'"):
        Derived(model, variety, GRPOConfig(str(tmp_path / "out")), ROWS)


@pytest.mark.parametrize(
    ("name", "action"),
    [("SFTTrainer", "paceline.sft"), ("RLOOTrainer", "'rloo'"), ("ModelConfig", "from trl")],
)
def test_import_names_replacement_when_class_is_only_in_trl(name: str, action: str) -> None:
    with pytest.raises(ImportError, match=f"paceline.trl has no {name}; .*{action}"):
        exec(f"from paceline.trl import {name}")
    assert not hasattr(paceline.trl, "Unknown")


def test_algorithm_of_another_trainer_is_used_when_settings_name_it(
    tmp_path: Path, model: str
) -> None:
    trainer = make_trainer(tmp_path, model, paceline={"algorithm.name": "rloo"})
    assert trainer.train().global_step == 2


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("optimizers", (object(), None)),
        ("quantization_config", object()),
        ("tools", [print]),
        ("rollout_func", print),
        ("environment_factory", print),
        ("reward_processing_classes", [object()]),
    ],
)
def test_argument_without_counterpart_is_rejected_by_name(argument: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"GRPOTrainer: {argument} cannot be honored"):
        GRPOTrainer("model", variety, **{argument: value})


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([], "no rows"),
        ([{"question": "?"}], "no column 'prompt', but question"),
        ({"train": [{"prompt": "?"}]}, "has the splits 'train'; pass one of them"),
        ("owner/name", "the dataset is the text 'owner/name'; expected rows"),
        (["a prompt"], "a row of the dataset is str; expected a dict"),
    ],
)
def test_dataset_without_prompts_is_rejected(
    tmp_path: Path, model: str, rows: Any, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_trainer(tmp_path, model, train_dataset=rows).train()


@pytest.mark.parametrize("row", [{"text": "?"}, {"prompt": None}, {"prompt": [{"role": "user"}]}])
def test_unusable_row_is_named_when_it_is_not_first(
    tmp_path: Path, model: str, row: dict[str, Any]
) -> None:
    with pytest.raises(DataError, match=r"1 of 7 rows .*\n  row 7: "):
        make_trainer(tmp_path, model, train_dataset=[*ROWS, row]).train()


def test_chat_prompts_are_rejected_when_model_has_no_template(tmp_path: Path, model: str) -> None:
    tokenizer_config = Path(model, "tokenizer_config.json")
    tokenizer_config.with_name("chat_template.jinja").unlink(missing_ok=True)
    rows = [{"prompt": [{"role": "user", "content": "?"}]}]
    with pytest.raises(ConfigError, match="tokenizer has no chat template"):
        make_trainer(tmp_path, model, train_dataset=rows).train()


def test_several_processes_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE is above 1"):
        make_trainer(tmp_path, "model")


def test_eval_strategy_evaluates_during_training(tmp_path: Path, model: str) -> None:
    trainer = make_trainer(
        tmp_path, model, eval_dataset=ROWS[:2], eval_strategy="steps", eval_steps=1
    )
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
    assert [entry["step"] for entry in entries] == list(range(trainer.state.global_step + 1))
    assert all(entry["eval_rewards/variety/mean"] > 0 for entry in entries)


def test_prompts_of_evaluation_may_be_longer_than_those_of_training(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Started(Exception):
        """The run has begun with the settings."""

    def steps(evaluation_data: list[dict[str, Any]], **settings: Any) -> None:
        longest = len(trainer.processing_class(evaluation_data[0]["prompt"])["input_ids"])
        assert settings["data.max_prompt_length"] == longest
        raise Started

    monkeypatch.setattr("paceline.steps", steps)
    rows = [{"prompt": ROWS[0]["prompt"] * 9}]
    trainer = make_trainer(tmp_path, model, eval_dataset=rows, eval_strategy="steps")
    with pytest.raises(Started):
        trainer.train()


def test_eval_strategy_needs_dataset(tmp_path: Path, model: str) -> None:
    with pytest.raises(ConfigError, match="needs one eval_dataset"):
        make_trainer(tmp_path, model, eval_strategy="steps").train()
