"""Held-out accuracy by training time of TRL's GRPOTrainer, with the task of teach.py.

    python benchmarks/teach_trl.py gsm8k --model FOLDER --train train.jsonl --test test.jsonl \
        [--vllm] [--steps 30] [--seeds 0] [--every 10]

The same model, prompts, batch, lengths, reward, learning rate and optimizer settings as teach.py:
weights and optimizer in float32, computation in bfloat16. Gradient checkpointing is off, because
the GPU has enough memory without it. Time counts from the start of `trainer.train()`, after the
model and vLLM have been loaded, and leaves evaluations out. Evaluations are greedy, with one
completion for each held-out row. Writes benchmarks/results/teach_TASK_trl.json.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.report import RESULTS, command_line, device, origin, write  # noqa: E402
from benchmarks.teach_tasks import TASKS, Rows, messages, read  # noqa: E402
from paceline.reward.verify import last_number  # noqa: E402

MICRO_BATCH = 16
EVALUATION_BATCH = 660


def correct(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    texts = [completion[0]["content"] for completion in completions]
    return [last_number(text, {"answer": a}) for text, a in zip(texts, answer, strict=True)]


@torch.no_grad()
def accuracy(model: Any, tokenizer: Any, rows: Rows, settings: dict[str, Any]) -> float:
    """Return the share of rows that greedy completions solve."""
    scores, training = [], model.training
    model.eval()
    for start in range(0, len(rows), EVALUATION_BATCH):
        part = rows[start : start + EVALUATION_BATCH]
        texts = [
            tokenizer.apply_chat_template(
                messages(row, settings), tokenize=False, add_generation_prompt=True
            )
            for row in part
        ]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        inputs = inputs.to(model.device)
        with torch.autocast(model.device.type, torch.bfloat16):
            made = model.generate(
                **inputs,
                do_sample=False,
                use_cache=True,
                max_new_tokens=settings["rollout.max_response_length"],
            )
        answers = tokenizer.batch_decode(
            made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        scores += [last_number(text, row) for text, row in zip(answers, part, strict=True)]
    model.train(training)
    return statistics.mean(scores)


class Clock(TrainerCallback):
    """Evaluates every few steps and counts the seconds of training without evaluations."""

    def __init__(self, score: Any, every: int) -> None:
        self._score, self._every = score, every
        self._begun = self._excluded = 0.0
        self.curve: list[list[float]] = []
        self.steps: list[float] = []

    def seconds(self) -> float:
        return time.perf_counter() - self._begun - self._excluded

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.cuda.synchronize() if torch.cuda.is_available() else None
        done = self.seconds()
        self.steps.append(done)
        if state.global_step % self._every == 0 or state.global_step == state.max_steps:
            begun = time.perf_counter()
            self.curve.append([round(done, 1), state.global_step, round(self._score(), 4)])
            print(self.curve[-1], flush=True)
            self._excluded += time.perf_counter() - begun


def run(options: argparse.Namespace, seed: int, data: tuple[Rows, Rows]) -> Any:
    task = TASKS[options.task]
    settings, limit = task.settings, options.micro_batch
    batch = settings["groups_per_step"] * settings["group_size"]
    rows = [{"prompt": messages(row, settings), "answer": row["answer"]} for row in data[0]]
    longest = settings["data.max_prompt_length"] + settings["rollout.max_response_length"]
    config = trl.GRPOConfig(
        output_dir=str(options.folder),
        learning_rate=settings["train.learning_rate"],
        lr_scheduler_type=settings.get("train.lr_schedule", "constant"),
        adam_beta2=0.95,
        per_device_train_batch_size=limit,
        gradient_accumulation_steps=batch // limit,
        num_generations=settings["group_size"],
        max_completion_length=settings["rollout.max_response_length"],
        max_steps=options.steps,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        use_vllm=options.vllm,
        vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=longest,
        temperature=1.0,
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=seed,
    )
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    trainer = trl.GRPOTrainer(
        model=options.model,
        args=config,
        train_dataset=Dataset.from_list(rows),
        reward_funcs=correct,
        processing_class=tokenizer,
    )

    def score() -> float:
        model = trainer.accelerator.unwrap_model(trainer.model)
        return accuracy(model, tokenizer, data[1], settings)

    clock = Clock(score, options.every or task.every)
    clock.curve.append([0.0, 0, round(score(), 4)])
    trainer.add_callback(clock)
    trainer.train()
    seconds = [b - a for a, b in zip([0.0, *clock.steps], clock.steps, strict=False)]
    return {
        "mode": "trl with vllm" if options.vllm else "trl",
        "seed": seed,
        "accuracy": clock.curve,
        "seconds": round(clock.steps[-1], 1),
        "step_s": round(statistics.median(seconds), 3),
        "rewards": [line["reward"] for line in trainer.state.log_history if "reward" in line],
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("task", choices=["gsm8k", "sums"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--train", type=Path)
    parser.add_argument("--test", type=Path)
    parser.add_argument("--limit", type=int, help="held-out rows; default: all")
    parser.add_argument("--vllm", action="store_true", help="generate with colocated vLLM")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--every", type=int)
    parser.add_argument("--micro-batch", type=int, default=MICRO_BATCH)
    parser.add_argument("--folder", type=Path, default=Path("runs/teach_trl"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    data = read(TASKS[options.task], options.train, options.test, options.limit)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    versions["trl"] = trl.__version__
    if options.vllm:
        import vllm

        versions["vllm"] = vllm.__version__
    out = options.out or RESULTS / f"teach_{options.task}_trl.json"
    result: dict[str, Any] = origin() | {
        "device": device(),
        "versions": versions,
        "settings": TASKS[options.task].settings,
        "held_out": len(data[1]),
        "runs": [],
    }
    for seed in map(int, options.seeds.split(",")):
        result["runs"].append(run(options, seed, data))
        print(json.dumps(result["runs"][-1]), flush=True)
        write(out, result)


if __name__ == "__main__":
    main()
