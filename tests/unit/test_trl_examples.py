"""TRL's GRPO examples, with the import changed and a tiny model and dataset in place of theirs.

Each script is a text, so that the change is visible: `from trl` becomes `from paceline.trl`.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.models import random_model

MODEL = "Qwen/Qwen2-0.5B-Instruct"
PLAIN = [{"prompt": f"Count to {n}:", "ground_truth": str(n)} for n in range(4)]
CHATS = [
    {
        "prompt": [{"role": "user", "content": f"What is {n} + 1?"}],
        "solution": f"${n + 1}$",
    }
    for n in range(4)
]
TASKS = [
    {"prompt": "What is 2+2?", "task": "math"},
    {"prompt": "Write a function that returns the sum of two numbers.", "task": "code"},
    {"prompt": "What is 3*4?", "task": "math"},
    {"prompt": "Write a function that returns the product of two numbers.", "task": "code"},
]

QUICK_START = """
from trl import GRPOTrainer
from trl.rewards import accuracy_reward

trainer = GRPOTrainer(
    model="Qwen/Qwen2-0.5B-Instruct",
    reward_funcs=accuracy_reward,
    train_dataset=dataset,
)
trainer.train()
"""

LENGTH = """
from trl import GRPOConfig, GRPOTrainer

def reward_num_unique_chars(completions, **kwargs):
    return [len(set(c)) for c in completions]

training_args = GRPOConfig(output_dir="Qwen2-0.5B-GRPO", logging_steps=1, max_steps=2,
                           max_completion_length=8)
trainer = GRPOTrainer(
    model="Qwen/Qwen2-0.5B-Instruct",
    reward_funcs=reward_num_unique_chars,
    args=training_args,
    train_dataset=dataset,
)
trainer.train()
trainer.save_model(training_args.output_dir)
"""

FORMAT = """
import re
from trl import GRPOConfig, GRPOTrainer

def format_reward_func(completions, **kwargs):
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    completion_contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, content) for content in completion_contents]
    return [1.0 if match else 0.0 for match in matches]

def ground_truth_func(prompts, completions, solution, trainer_state, **kwargs):
    assert prompts[0][-1]["role"] == "user" and len(solution) == len(completions)
    return [float(s.strip("$") in c[0]["content"]) for s, c in zip(solution, completions)]

trainer = GRPOTrainer(
    model="Qwen/Qwen2-0.5B-Instruct",
    reward_funcs=[format_reward_func, ground_truth_func],
    args=GRPOConfig("out", reward_weights=[0.2, 1.0], max_steps=2, max_completion_length=8,
                    logging_steps=1),
    train_dataset=dataset,
)
trainer.train()
"""

MULTI_TASK = """
from trl import GRPOConfig, GRPOTrainer

def math_reward_func(prompts, completions, task, **kwargs):
    rewards = []
    for prompt, completion, t in zip(prompts, completions, task):
        rewards.append(float(len(completion)) if t == "math" else None)
    return rewards

def coding_reward_func(prompts, completions, task, **kwargs):
    return [float("def" in c) if t == "code" else None for c, t in zip(completions, task)]

trainer = GRPOTrainer(
    model="Qwen/Qwen2-0.5B-Instruct",
    reward_funcs=[math_reward_func, coding_reward_func],
    args=GRPOConfig("out", per_device_train_batch_size=32, max_steps=1, max_completion_length=8,
                    logging_steps=1),
    train_dataset=dataset,
)
trainer.train()
"""

ASYNC = """
import asyncio
from trl import GRPOConfig, GRPOTrainer

async def async_reward_func(prompts, completions, log_metric, **kwargs):
    await asyncio.sleep(0)
    log_metric("length", sum(map(len, completions)) / len(completions))
    return [1.0 if len(completion) > 5 else 0.0 for completion in completions]

trainer = GRPOTrainer(
    model="Qwen/Qwen2-0.5B-Instruct",
    reward_funcs=async_reward_func,
    args=GRPOConfig("out", max_steps=2, max_completion_length=8, logging_steps=1),
    train_dataset=dataset,
)
trainer.train()
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return random_model(tmp_path / "model")


def run_script(script: str, model: str, dataset: list[dict[str, Any]]) -> Any:
    """Run a script of TRL's documentation and return its trainer."""
    script = script.replace("from trl", "from paceline.trl").replace(MODEL, model)
    names: dict[str, Any] = {"dataset": dataset}
    exec(script, names)
    return names["trainer"]


@pytest.mark.slow
def test_quick_start_runs_with_default_arguments(model: str) -> None:
    trainer = run_script(QUICK_START, model, CHATS[:1])
    assert trainer.state.global_step == 3  # three epochs of one prompt
    assert Path("model-GRPO", "summary.json").exists()


def test_single_reward_example_saves_model(model: str) -> None:
    from transformers import AutoModelForCausalLM

    trainer = run_script(LENGTH, model, PLAIN)
    assert [entry["step"] for entry in trainer.state.log_history] == [1, 2, 2]
    assert AutoModelForCausalLM.from_pretrained("Qwen2-0.5B-GRPO").num_parameters() > 0


def test_conversational_example_weights_its_rewards(model: str) -> None:
    entry = run_script(FORMAT, model, CHATS).state.log_history[0]
    parts = 0.2 * entry["rewards/format_reward_func/mean"]
    parts += entry["rewards/ground_truth_func/mean"]
    assert entry["reward"] == pytest.approx(parts)


def test_multi_task_example_leaves_out_none(model: str) -> None:
    entry = run_script(MULTI_TASK, model, TASKS).state.log_history[0]
    parts = [entry[f"rewards/{name}_reward_func/mean"] for name in ("math", "coding")]
    assert entry["reward"] == pytest.approx(sum(parts) / 2)  # half of the prompts each


def test_async_example_logs_its_metric(model: str) -> None:
    entry = run_script(ASYNC, model, PLAIN).state.log_history[0]
    assert entry["length"] > 0
    assert 0 <= entry["rewards/async_reward_func/mean"] <= 1
