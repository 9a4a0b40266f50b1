"""Opens the train engine that `train.backend` selects."""

from paceline.errors import ConfigError
from paceline.training.engine import TrainEngine
from paceline.training.lora import LoraDevice
from paceline.training.packed import Head
from paceline.training.settings import TrainSettings
from paceline.training.single import SingleDevice


def check_backend(settings: TrainSettings, gpus: int) -> None:
    """Raise ConfigError if the backend needs a GPU and this machine has none."""
    if settings.backend == "megatron" and not gpus:
        raise ConfigError(
            "train.backend = 'megatron' needs a CUDA device; use 'single' or 'fsdp', with "
            "train.tensor_parallel = 1 and train.pipeline_parallel = 1 for 'single'"
        )


def open_actor(
    model_path: str, settings: TrainSettings, temperature: float, seed: int
) -> TrainEngine:
    """Open the engine of the policy; `seed` initializes its adapters if it trains adapters."""
    if settings.lora:
        return LoraDevice.open_with_adapters(model_path, settings, temperature, seed)
    return open_engine(model_path, settings, temperature)


def open_engine(
    model_path: str, settings: TrainSettings, temperature: float, head: Head = "policy"
) -> TrainEngine:
    """Open an engine; with head = "value", the critic's, without an output layer."""
    if settings.backend == "fsdp":
        from paceline.training.fsdp import Fsdp

        return Fsdp.open(model_path, settings, temperature, head)
    if settings.backend == "megatron":
        try:
            from paceline.training.megatron.engine import Megatron
        except ImportError as error:
            raise ConfigError(
                f"train.backend = 'megatron' needs megatron-core ({error}): "
                "pip install 'paceline[megatron]'"
            ) from error
        return Megatron.open(model_path, settings, temperature, head)
    return SingleDevice.open(model_path, settings, temperature, head)
