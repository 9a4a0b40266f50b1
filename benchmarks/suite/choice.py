"""What the environment asks of the test guide's commands, checked, and the settings that follow from it.

NUM_GPUS         how many of the GPUs to use; 0 = none. Unset: all there are
MODEL_PATH       a folder with a model, or MODEL_ID, a hub id. Unset: the built-in tiny model
ACTOR_STRATEGY   single, fsdp2 or megatron
ENGINE           native or vllm
CLUSTER          local or ray
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
    model: str | None = None  # None: whatever the recipe or the benchmark has of its own
    strategy: str = "single"
    engine: str = "native"
    cluster: str = "local"

    @property
    def backend(self) -> str:
        return BACKENDS[self.strategy]

    @property
    def train_ranks(self) -> int:
        """Half of the GPUs for a back end of several ranks; without GPUs two processes stand in for them."""
        return 1 if self.backend == "single" else max(1, self.gpus // 2) if self.gpus else 2

    def engines(self, at_least: int = 1) -> int:
        """An engine for each GPU that the trainer leaves. A second vLLM would not fit beside the first."""
        return max(self.gpus - self.train_ranks, 1 if self.engine == "vllm" else at_least)

    def settings(self, batch: int, at_least_engines: int = 1) -> list[str]:
        """`batch` is what one training device takes; several take several times as much."""
        found = [
            f"train.backend={self.backend}",
            f"placement.train_ranks={self.train_ranks}",
            f"placement.rollout_workers={self.engines(at_least_engines)}",
            f"train_batch_size={batch * (self.train_ranks if self.gpus else 1)}",
            f"rollout.engine={self.engine}",
            f"cluster={self.cluster}",
        ]
        if self.model:
            found += [
                f"model={self.model}",
                "train.learning_rate=1e-6",
                "data.max_prompt_length=512",
            ]  # the recipes are for the tiny model
        return found

    def __str__(self) -> str:
        devices = f"{self.gpus} GPU{'s' if self.gpus > 1 else ''}" if self.gpus else "CPU only"
        model = self.model or "built-in model"
        return f"{devices}, {model}, ACTOR_STRATEGY={self.strategy}, ENGINE={self.engine}, CLUSTER={self.cluster}"


def read_choice(environment: Mapping[str, str], gpus_present: int) -> Choice:
    """Raises ConfigError with a sentence for a value that cannot be used."""
    return Choice(
        gpus=_gpus(environment.get("NUM_GPUS"), gpus_present),
        model=environment.get("MODEL_PATH") or environment.get("MODEL_ID") or None,
        strategy=_one_of(environment, "ACTOR_STRATEGY", tuple(BACKENDS)),
        engine=_one_of(environment, "ENGINE", ENGINES),
        cluster=_one_of(environment, "CLUSTER", CLUSTERS),
    )


def read_target(environment: Mapping[str, str]) -> float | None:
    """TARGET_SAMPLES_PER_S: how fast the best setting has to generate. Unset: no target of the user's."""
    value = environment.get("TARGET_SAMPLES_PER_S") or ""
    try:
        target = float(value) if value else None
    except ValueError:
        target = 0.0
    if target is not None and not target > 0:
        raise ConfigError(
            f"TARGET_SAMPLES_PER_S={value} is not a rate; use a number above 0, or leave it unset"
        )
    return target


def take(environment: Mapping[str, str] = os.environ) -> Choice:
    """Read the environment, and hide the GPUs that are not to be used from this process and those it starts."""
    import torch

    choice = read_choice(environment, torch.cuda.device_count())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(
        str(index) for index in range(choice.gpus)
    )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[: choice.gpus])
    return choice


def _one_of(environment: Mapping[str, str], name: str, known: tuple[str, ...]) -> str:
    value = environment.get(name) or known[0]
    if value not in known:
        raise ConfigError(f"{name}={value} is not known; use one of {', '.join(known)}")
    return value


def _gpus(value: str | None, present: int) -> int:
    if not value:
        return present
    if not value.isdigit():
        raise ConfigError(
            f"NUM_GPUS={value} is not a number of GPUs; use 0 to {present}, or leave it unset to use all"
        )
    if int(value) > present:
        raise ConfigError(
            f"NUM_GPUS={value}, but there {'is' if present == 1 else 'are'} {present or 'none'}; lower it, or leave it unset"
        )
    return int(value)
