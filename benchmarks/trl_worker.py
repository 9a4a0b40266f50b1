"""TRL's GRPOTrainer on CPU, started by vs_trl.py in TRL's own interpreter (see install_trl.sh): one JSON job on the command line,
one JSON line out. `reward` is what both sides are scored with.

Run twice: as it comes, and set up for speed (one batch of 64, no gradient checkpointing, float32 products, since with bfloat16 it
was slower here, SDPA attention, fused AdamW, nothing logged). No reference model in either. Its continuous batching is left off: tried
once on CPU, it took 4 s a step, not 0.6.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any


def reward(answer: str, row: Mapping[str, Any]) -> float:
    """The share of digits: cheap, and different for every answer of a random model."""
    return sum(character.isdigit() for character in answer) / max(1, len(answer))


TUNED = {
    "gradient_accumulation_steps": 1, "gradient_checkpointing": False, "bf16": False, "optim": "adamw_torch_fused",
    "model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"}, "dataloader_num_workers": 0, "dataloader_pin_memory": False,
    "logging_strategy": "no", "log_completions": False,
}  # fmt: skip


def work(job: dict[str, Any]) -> dict[str, Any]:
    """What must be said for the work to be the same: sizes, sampling, one update per 64 answers. TRL's default is 8 rows at a time."""
    return {
        "output_dir": job["folder"], "max_steps": job["steps"], "learning_rate": 1e-6, "lr_scheduler_type": "constant", "weight_decay": 0.0,
        "seed": 0, "gradient_accumulation_steps": job["groups"] * job["group_size"] // 8, "num_generations": job["group_size"],
        "max_completion_length": job["new_tokens"], "temperature": 1.0, "beta": 0.0, "use_cpu": True, "use_vllm": False,
        "report_to": "none", "save_strategy": "no", "eval_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip


def train(job: dict[str, Any]) -> dict[str, Any]:
    import torch
    import transformers
    import trl
    from datasets import load_dataset, logging
    from transformers import TrainerCallback

    torch.set_num_threads(job["threads"])
    logging.disable_progress_bar()
    tokens: list[int] = []
    ends: list[tuple[float, float]] = []  # wall clock and processor time

    def score(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        tokens.append(sum(len(ids) for ids in completion_ids))
        return [reward(answer, {}) for answer in completions]

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
        "json", data_files=job["prompts"], split="train", cache_dir=job["folder"]
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
    wall, processor = zip(
        *([b - a for a, b in zip(*pair, strict=True)] for pair in pairwise(ends)), strict=True
    )
    return {"versions": versions, "seconds": wall, "processor_s": processor, "tokens": tokens[1:]}


if __name__ == "__main__":
    answer = os.fdopen(
        os.dup(1), "w"
    )  # the trainer prints to stdout: keep the real one for ourselves
    os.dup2(2, 1)
    print(json.dumps(train(json.loads(sys.argv[1]))), file=answer)
