"""Training from a Python program: the public API with objects of the program."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from examples import custom_program
from examples.custom_environment import TwoTries
from paceline.errors import DataError, RewardError
from paceline.workers import automatic
from tests.audits import assert_consistent

SMALL: dict[str, Any] = {
    "groups_per_step": 2,
    "group_size": 2,
    "data.limit": 256,
    "rollout.max_response_length": 4,
    "placement.threads": 1,
}
ROWS = [{"prompt": f"say {number}", "answer": str(number)} for number in range(4)]


def score(completion: str, row: dict[str, Any]) -> float:
    return float(row["answer"] in completion)


@pytest.fixture
def small(model: str, tmp_path: Path) -> dict[str, Any]:
    return SMALL | {"model": model, "run_dir": str(tmp_path / "run"), "display": False}


def test_train_uses_environment_and_reward_of_program(small: dict[str, Any]) -> None:
    run = paceline.train(
        data={"task": "copy:3", "max_prompt_length": 64},
        reward=custom_program.score,
        environment=TwoTries,
        steps=2,
        **small,
    )
    assert run.summary["steps"] == 2 and [row["step"] for row in run.metrics] == [1, 2]
    assert all(row["reward_component/correct"] == 0.0 for row in run.metrics)
    assert all(row["rollout/length_mean"] == 8 for row in run.metrics), "two tries of four tokens"
    assert max(row["train/logprob_diff_max"] for row in run.metrics) < 1e-3, "contexts differ"
    assert (run.checkpoint / "config.json").exists()


def generator() -> Iterator[dict[str, Any]]:
    yield from ROWS * 10


def test_async_run_trains_all_rows_of_generator_that_ends(small: dict[str, Any]) -> None:
    """It asks for more rows than it needs, to generate ahead."""
    ahead = {"schedule.max_staleness": 2, "schedule.on_sync": "swap"}
    rows = ({"prompt": f"say {number}", "answer": "1"} for number in range(12))
    settings = small | {"groups_per_step": 3}
    del settings["data.limit"]  # it would read them all first, and repeat them
    run = paceline.train(data=rows, reward=score, steps=4, **settings, **ahead)
    assert run.summary["steps"] == 4
    assert_consistent(Path(small["run_dir"]))
    rows = ({"prompt": f"say {number}", "answer": "1"} for number in range(11))
    with pytest.raises(DataError, match="ended after 11 rows, but the run needs more"):
        paceline.train(data=rows, reward=score, steps=4, fresh=True, **settings, **ahead)


@pytest.mark.parametrize("rows", [ROWS, tuple(ROWS), generator()], ids=["list", "tuple", "stream"])
def test_train_accepts_rows_of_program(small: dict[str, Any], rows: Any) -> None:
    run = paceline.train(data=rows, reward=score, steps=2, **small)
    assert run.summary["ledger"]["trained"] == 4


def test_steps_are_watched_and_stopped(small: dict[str, Any]) -> None:
    steps = paceline.steps(data="copy:3", steps=10_000, **small)
    for step in steps:
        assert len(step.groups) == 2 and step.metrics["reward/mean"] == step.reward
        if step.step == 3:
            break
    run = steps.stop()
    assert 3 <= run.summary["steps"] < 10_000
    assert run.checkpoint.exists()
    assert len(run.metrics) == run.summary["steps"]


def test_steps_resume_stopped_run(small: dict[str, Any]) -> None:
    first = paceline.steps(data="copy:3", steps=8, **small)
    next(first)
    stopped = first.stop().summary["steps"]
    later = [step.step for step in paceline.steps(data="copy:3", steps=stopped + 2, **small)]
    assert later == [stopped + 1, stopped + 2]
    assert_consistent(Path(small["run_dir"]))


def test_fresh_run_is_rejected_when_its_model_would_be_moved_aside(small: dict[str, Any]) -> None:
    first = paceline.train(data="copy:3", steps=1, **small)
    again = small | {"model": first.checkpoint, "fresh": True}
    with pytest.raises(paceline.PacelineError, match=r"moved aside .*; use another run_dir"):
        paceline.train(data="copy:3", steps=1, **again)
    assert first.checkpoint.exists()


def test_run_waits_for_ended_loop_in_same_directory(small: dict[str, Any]) -> None:
    for step in paceline.steps(data="copy:3", steps=10_000, **small):
        first = step.step
        break
    run = paceline.train(data="copy:3", steps=first + 100, **small)
    assert run.summary["steps"] == first + 100 and len(run.metrics) == first + 100


def test_run_stays_in_its_directory_when_program_changes_directory(
    small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)

    def elsewhere(completion: str, row: dict[str, Any]) -> float:
        os.chdir(tmp_path / "other")
        return 1.0

    run = paceline.train(data=ROWS, reward=elsewhere, steps=2, **small | {"run_dir": "relative"})
    assert [row["step"] for row in run.metrics] == [1, 2]
    assert run.checkpoint.is_relative_to(tmp_path / "relative") and run.checkpoint.exists()
    assert not list(Path.cwd().iterdir())


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def raise_speechless() -> None:
    raise Speechless


class WrongReward:
    def __init__(self, scores: Any) -> None:
        self._scores = scores

    async def score(self, prompt: paceline.Prompt, trajectories: Any) -> Any:
        return self._scores() if callable(self._scores) else self._scores

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("scores", "problem"),
    [
        (["good", "bad"], r"returned 'good' \(str\); expected a number"),
        ([1.0], "has 1 values for 2 texts"),
        ([1e19, 0.0], r"returned 1e\+19; expected at most 1e\+18"),
        (None, "raised TypeError"),
        (lambda: 1 / 0, "raised ZeroDivisionError: division by zero"),
        (raise_speechless, "raised Speechless: .its text cannot be shown"),
    ],
)
def test_wrong_result_of_reward_object_ends_run(
    small: dict[str, Any], scores: Any, problem: str
) -> None:
    with pytest.raises(RewardError, match=rf"the reward of prompt '.*' {problem}"):
        paceline.train(data=ROWS, reward=WrongReward(scores), steps=1, **small)


def test_reward_object_may_return_arrays(small: dict[str, Any]) -> None:
    reward = WrongReward(torch.tensor([1.0, 3.0]))
    assert paceline.train(data=ROWS, reward=reward, steps=1, **small).summary["reward_last"] == 2.0


def test_train_accepts_list_of_files(small: dict[str, Any], tmp_path: Path) -> None:
    for number, row in enumerate(ROWS):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps(row))
    files = [tmp_path / "0.jsonl", str(tmp_path / "[12].jsonl")]
    found = paceline.train(data=files, reward=score, steps=2, **small)
    assert found.summary["ledger"]["trained"] == 4


def test_run_records_automatic_settings_and_names_changed_ones(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = paceline.train(data="copy:3", steps=1, **small)
    recorded = json.loads((first.run_dir / "settings.json").read_text())
    assert recorded["rollout"]["slots"] == 4 and recorded["train"]["dtype"] == "float32"
    monkeypatch.setattr(automatic, "SMALL_CPU_SLOTS", 2)  # as if the devices were smaller
    paceline.train(data="copy:3", steps=2, **small)
    assert "rollout.slots was 4 before the run was resumed, and is 2" in caplog.text


def test_async_functions_leave_event_loop_free(small: dict[str, Any]) -> None:
    async def main() -> tuple[int, list[int], dict[str, Any]]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        run = await paceline.train_async(data="copy:3", steps=2, **small)
        more = {"steps": 4} | small
        steps = [step.step async for step in paceline.steps(data="copy:3", **more)]
        options = {name: value for name, value in small.items() if name != "display"}
        options |= {"model": run.checkpoint, "data.limit": 2}
        found = await paceline.evaluate_async(data="copy:3", **options)
        ticking.cancel()
        return ticks, steps, found

    ticks, steps, found = asyncio.run(main())
    assert ticks > 5 and steps == [3, 4] and found["prompts"] == 2


def test_train_works_in_running_event_loop(small: dict[str, Any]) -> None:
    async def notebook() -> paceline.Run:
        return paceline.train(data="copy:3", steps=1, **small)

    assert asyncio.run(notebook()).summary["steps"] == 1


def test_evaluate_scores_rows_with_function_of_program(small: dict[str, Any]) -> None:
    del small["display"]
    found = paceline.evaluate(data=ROWS, reward=lambda completion, row: 0.25, **small)
    assert found["prompts"] == 4 and found["reward"] == 0.25


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stepz": 3}, "unknown setting 'stepz'; did you mean 'steps'?"),
        ({"rollout": {"max_tokens": 3}}, "rollout.max_tokens"),
        ({"data": "nothing.jsonl", "reward": "exact"}, "nothing.jsonl"),
        ({"data": [{"question": "1"}], "reward": score}, "data.prompt_key=question"),
        ({"data": [], "reward": score}, "no usable rows"),
        (
            {"data": ROWS, "reward": score, "evaluation_data": [{"question": "1"}]},
            "for example evaluation.prompt_key=question",
        ),
        (
            {"data": ROWS, "data.answer_key": "answer", "reward": score}
            | {"evaluation_data": [{"prompt": "1", "label": "1"}]},
            "columns found: prompt, label. Set evaluation.answer_key for these rows",
        ),
        ({"data": {"prompt": ["a", "b"]}, "reward": score}, "rows as a list of dicts"),
        ({"data": {"promptkey": "x"}}, "did you mean 'data.prompt_key'?"),
        ({"data": {"train_files": "nothing.jsonl"}, "reward": "exact"}, "nothing.jsonl"),
        ({"model": torch.nn.Linear(1, 1)}, "an object of the class Linear"),
        ({"data": ROWS}, "reward.function"),
        ({"data": ROWS, "reward": [score], "reward.weights": [1, 2]}, "reward.weights"),
        ({"recipe": "hybrit"}, "hybrid"),
        ({"recipe": "Qwen/Qwen2.5-0.5B"}, "To train a model of this name, set model=Qwen/Qwen2.5"),
        (
            {"model": paceline.Run(Path("runs/a"), {"steps": 7})},
            "runs/a/checkpoints/step_00000007/actor",
        ),
        ({"data": "copy:3", "resume_from": True}, "Without it, a run resumes from its last"),
    ],
)
def test_mistake_is_paceline_error(
    small: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(paceline.PacelineError) as caught:
        paceline.train(**small | arguments)
    assert message in str(caught.value)


def test_directory_of_model_is_rejected_as_recipe_with_name_of_setting(
    small: dict[str, Any],
) -> None:
    with pytest.raises(paceline.PacelineError, match="To train this model, set model=/"):
        paceline.train(small["model"], data="copy:3")


def test_settings_next_to_configuration_are_error(small: dict[str, Any]) -> None:
    config = paceline.load_config(values={"model": small["model"], "data.task": "copy:3"})
    with pytest.raises(paceline.PacelineError, match=r"pass them to paceline.load_config"):
        paceline.train(config, steps=3)


def test_configuration_is_trained_on_rows_and_rewards_of_program(small: dict[str, Any]) -> None:
    values = {name: value for name, value in small.items() if name != "display"}
    config = paceline.load_config(values=values | {"steps": 1, "data.task": "copy:3"})
    run = paceline.train(config, data=ROWS, reward=[score, score], display=False)
    assert run.summary["steps"] == 1
    assert {"reward_component/score_1", "reward_component/score_2"} <= run.metrics[0].keys()


def test_splits_of_dataset_are_rejected_with_name_of_one(small: dict[str, Any]) -> None:
    class DatasetDict(dict[str, Any]):
        num_rows = 4

    with pytest.raises(paceline.PacelineError, match=r"DatasetDict with train.*rows\['train'\]"):
        paceline.train(data=DatasetDict(train=ROWS), reward=score, steps=1, **small)


def test_error_of_reward_function_ends_run(small: dict[str, Any]) -> None:
    def broken(completion: str, row: dict[str, Any]) -> float:
        return row["missing"]  # type: ignore[no-any-return]

    with pytest.raises(paceline.PacelineError, match=r"broken.*KeyError: 'missing'"):
        paceline.train(data=ROWS, reward=broken, steps=1, **small)


def test_program_needs_no_main_guard(small: dict[str, Any], tmp_path: Path) -> None:
    """The trainer is a separate process here, and the loss travels there from the program."""
    program = f"""
        import paceline

        def loss(logprobs, proximal, advantages, rows):
            return -advantages * (logprobs - proximal).exp()

        settings = {small!r}
        run = paceline.train(data="copy:3", steps=2, algorithm={{"loss": loss}},
                             placement={{"rollout": "other"}}, **settings)
        print(run.summary["steps"], "steps")
    """
    assert run_program(program, tmp_path).stdout.endswith("2 steps\n")


LOOP = """if True:
    import paceline
    for step in paceline.steps({}):
        print(step.step, flush=True)
"""
ASYNC_LOOP = """if True:
    import asyncio, paceline
    async def main():
        async for step in paceline.steps({}):
            print(step.step, flush=True)
    asyncio.run(main())
"""
TRAIN_ASYNC = """if True:
    import asyncio, itertools, paceline
    scored = itertools.count(1)
    def score(completion, row):
        if next(scored) == 20:  # after the first step
            print(1, flush=True)
        return float(len(completion))
    asyncio.run(paceline.train_async({}, reward=score))
"""


@pytest.mark.parametrize(
    "form", [LOOP, ASYNC_LOOP, TRAIN_ASYNC], ids=["for", "async for", "train_async"]
)
def test_control_c_ends_program_and_keeps_its_steps(
    form: str, small: dict[str, Any], tmp_path: Path
) -> None:
    program = form.format(f"data='copy:3', steps=100000, save_every=0, **{small!r}")
    started = subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    assert started.stdout.readline() == "1\n"
    started.send_signal(signal.SIGINT)
    started.stdout.read()
    assert started.wait(60) != 0
    assert list((tmp_path / "run" / "checkpoints").glob("step_*"))


def run_program(program: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    (folder / "program.py").write_text(textwrap.dedent(program))
    return subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )


def test_example_program_trains(small: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    del small["model"]
    run = custom_program.main(**small | {"group_size": 4})
    assert run.checkpoint.exists() and "step 1: reward" in capsys.readouterr().out
