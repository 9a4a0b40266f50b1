"""Environment variables of run_e2e_test.sh and run_benchmark.sh, and the settings they imply.

NUM_GPUS         number of GPUs to use, 0 for none. Default: all
MODEL_PATH       model directory, or MODEL_ID, a Hugging Face model ID. Default: the built-in model
ACTOR_STRATEGY   single, fsdp2 or megatron. Default: single
ENGINE           native or vllm. Default: native
CLUSTER          local or ray. Default: local
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import ConfigError

BACKENDS = {"single": "single", "fsdp2": "fsdp", "megatron": "megatron"}
ENGINES = ("native", "vllm")
CLUSTERS = ("local", "ray")


@dataclass(frozen=True, slots=True)
class Choice:
    gpus: int = 0
    model: str | None = None  # None: the model of the recipe or the benchmark
    strategy: str = "single"
    engine: str = "native"
    cluster: str = "local"

    @property
    def backend(self) -> str:
        return BACKENDS[self.strategy]

    @property
    def train_ranks(self) -> int:
        """Half of the GPUs for a backend with several ranks, two processes without GPUs."""
        return 1 if self.backend == "single" else max(1, self.gpus // 2) if self.gpus else 2

    def engines(self, at_least: int = 1) -> int:
        """Return one engine per GPU that the trainer leaves free.

        `at_least` does not apply to vLLM: two engines do not fit on one GPU.
        """
        return max(self.gpus - self.train_ranks, 1 if self.engine == "vllm" else at_least)

    def settings(self, batch: int, at_least_engines: int = 1) -> list[str]:
        """Return the settings of a run; `batch` is the batch size per training device."""
        found = [
            f"train.backend={self.backend}",
            f"placement.train_ranks={self.train_ranks}",
            f"placement.rollout_workers={self.engines(at_least_engines)}",
            f"train_batch_size={batch * (self.train_ranks if self.gpus else 1)}",
            f"rollout.engine={self.engine}",
            f"cluster={self.cluster}",
        ]
        if self.model:
            # the recipes are tuned for the built-in model
            found += [
                f"model={self.model}",
                "train.learning_rate=1e-6",
                "data.max_prompt_length=512",
            ]
        return found

    def __str__(self) -> str:
        devices = f"{self.gpus} GPU{'s' if self.gpus > 1 else ''}" if self.gpus else "CPU only"
        model = self.model or "built-in model"
        return (
            f"{devices}, {model}, ACTOR_STRATEGY={self.strategy}, ENGINE={self.engine}, "
            f"CLUSTER={self.cluster}"
        )


def read_choice(environment: Mapping[str, str], gpus_present: int) -> Choice:
    """Return the choice; raise ConfigError if a variable has an invalid value."""
    return Choice(
        gpus=_gpus(environment.get("NUM_GPUS"), gpus_present),
        model=environment.get("MODEL_PATH") or environment.get("MODEL_ID") or None,
        strategy=_one_of(environment, "ACTOR_STRATEGY", tuple(BACKENDS)),
        engine=_one_of(environment, "ENGINE", ENGINES),
        cluster=_one_of(environment, "CLUSTER", CLUSTERS),
    )


def read_target(environment: Mapping[str, str]) -> float | None:
    """Return TARGET_SAMPLES_PER_S, or None if the user sets no target."""
    value = environment.get("TARGET_SAMPLES_PER_S") or ""
    try:
        target = float(value) if value else None
    except ValueError:
        target = 0.0
    if target is not None and not target > 0:
        raise ConfigError(
            f"TARGET_SAMPLES_PER_S={value}: expected a number above 0; correct it or unset it"
        )
    return target


def choice_from_environment() -> Choice:
    """Read the variables and hide the other GPUs from this process and its children."""
    import torch

    choice = read_choice(os.environ, torch.cuda.device_count())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(
        str(index) for index in range(choice.gpus)
    )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[: choice.gpus])
    return choice


def _one_of(environment: Mapping[str, str], name: str, known: tuple[str, ...]) -> str:
    value = environment.get(name) or known[0]
    if value not in known:
        raise ConfigError(f"{name}={value}: expected one of {', '.join(known)}")
    return value


def _gpus(value: str | None, present: int) -> int:
    if not value:
        return present
    if not value.isdigit() or int(value) > present:
        raise ConfigError(
            f"NUM_GPUS={value}: expected 0 to {present}, the number of GPUs of this machine; "
            "correct it, or unset it to use all GPUs"
        )
    return int(value)
