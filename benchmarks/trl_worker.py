"""TRL's GRPOTrainer on CPU, started by vs_trl.py in TRL's interpreter (see install_trl.sh).

Reads one JSON job from the command line and prints one JSON line. `reward` scores both sides.

Runs with TRL's defaults, or tuned for speed: one batch of 64, no gradient checkpointing, float32
matmuls (bfloat16 was slower here), SDPA attention, fused AdamW, no logging. Neither uses a
reference model. TRL's continuous batching is off: in one trial on CPU (2026-11-15) it took 4 s per
step instead of 0.6 s.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any


def reward(completion: str, row: Mapping[str, Any]) -> float:
    """Return the fraction of digits: cheap, and varied between completions of a random model."""
    return sum(character.isdigit() for character in completion) / max(1, len(completion))


TUNED = {
    "gradient_accumulation_steps": 1,
    "gradient_checkpointing": False,
    "bf16": False,
    "optim": "adamw_torch_fused",
    "model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"},
    "dataloader_num_workers": 0,
    "dataloader_pin_memory": False,
    "logging_strategy": "no",
    "log_completions": False,
}


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that make both sides do the same work.

    These are sizes, sampling and one update per 64 completions. TRL's default is 8 rows at a time.
    """
    return {
        "output_dir": job["directory"],
        "max_steps": job["steps"],
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "seed": 0,
        "gradient_accumulation_steps": job["groups"] * job["group_size"] // 8,
        "num_generations": job["group_size"],
        "max_completion_length": job["new_tokens"],
        "temperature": 1.0,
        "beta": 0.0,
        "use_cpu": True,
        "use_vllm": False,
        "report_to": "none",
        "save_strategy": "no",
        "eval_strategy": "no",
        "disable_tqdm": True,
    }


def train(job: dict[str, Any]) -> dict[str, Any]:
    import torch
    import transformers
    import trl
    from datasets import load_dataset, logging
    from transformers import TrainerCallback

    torch.set_num_threads(job["threads"])
    logging.disable_progress_bar()
    tokens: list[int] = []
    ends: list[tuple[float, float]] = []  # wall clock and CPU time

    def score(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        tokens.append(sum(len(ids) for ids in completion_ids))
        return [reward(completion, {}) for completion in completions]

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            ends.append((time.perf_counter(), time.process_time()))

    config = trl.GRPOConfig(
        **{
            **work(job),
            **(
                TUNED | {"per_device_train_batch_size": job["groups"] * job["group_size"]}
                if job["tuned"]
                else {}
            ),
        }
    )
    dataset = load_dataset(
        "json", data_files=job["prompts"], split="train", cache_dir=job["directory"]
    )
    trainer = trl.GRPOTrainer(
        job["model"], reward_funcs=score, args=config, train_dataset=dataset, callbacks=[Clock()]
    )
    trainer.train()
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "trl": trl.__version__,
    }
    wall, cpu = zip(
        *([b - a for a, b in zip(*pair, strict=True)] for pair in pairwise(ends)), strict=True
    )
    return {"versions": versions, "seconds": wall, "cpu_s": cpu, "tokens": tokens[1:]}


if __name__ == "__main__":
    # the trainer prints to stdout, so keep the original stdout for the reply
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps(train(json.loads(sys.argv[1]))), file=reply)
