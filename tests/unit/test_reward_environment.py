"""Environment of reward processes: they get no secrets, unless a setting passes them."""

import textwrap
from pathlib import Path

import pytest

from paceline.errors import ConfigError, RewardError
from paceline.reward.reward import RewardSettings, open_reward
from paceline.secret_variables import secret_names
from tests.scoring import in_loop, opened, score

REWARDS = """
    import os, pathlib

    def seen(completion, row):
        texts = str(os.environ) + pathlib.Path("/proc/self/environ").read_text()
        return float("canary" in texts)
    def needing(completion, row): return len(os.environ["OPENAI_API_KEY"])
    class Client:
        def __init__(self): raise RuntimeError("set OPENAI_API_KEY")
        def __call__(self, completion, row): return 1.0
"""
SECRETS = ["HF_TOKEN", "WANDB_API_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "MY_SECRET", "apikey"]
SECRETS += ["DB_PASSWORD", "GITHUB_TOKEN", "SSH_AUTH_SOCK", "GOOGLE_APPLICATION_CREDENTIALS"]
SECRETS += ["SSH_KEYS", "NPM_AUTH", "GH_PAT", "SENTRY_DSN", "SECRET_KEY_BASE", "KEY_PASSPHRASE"]
SECRETS += ["DB_PASSWORD2", "BACKUP_KEYS1_OLD"]
OTHERS = ["PATH", "HOME", "PWD", "TOKENIZERS_PARALLELISM", "CUDA_VISIBLE_DEVICES", "LANG"]
OTHERS += [
    "KEYBOARD",
    "HF_HOME",
    "HTTPS_PROXY",
    "PYTHONPATH",
    "AWS_DEFAULT_REGION",
    "AWS_CA_BUNDLE",
    "PATTERN",
]


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("environment") / "rewards.py"
    file.write_text(textwrap.dedent(REWARDS))
    return file


def test_names_that_look_like_secrets_are_found() -> None:
    environment = dict.fromkeys(SECRETS + OTHERS, "http://proxy:8080")
    assert secret_names(environment) == sorted(SECRETS)


def test_url_with_password_is_secret() -> None:
    urls = {"A": "postgres://me:pw@db/x", "B": "https://a.b/c", "C": "redis://:pw@db", "D": "a:b@c"}
    assert secret_names(urls) == ["A", "C"]


def test_passed_names_may_be_patterns() -> None:
    environment = dict.fromkeys(["OPENAI_API_KEY", "OPENAI_ORG_KEY", "HF_TOKEN"], "x")
    assert secret_names(environment, ["OPENAI_*"]) == ["HF_TOKEN"]


@in_loop
async def test_reward_process_does_not_get_secrets(
    rewards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary")
    monkeypatch.setenv("DATABASE_URL", "postgres://me:canary@db/x")
    async with opened(f"{rewards}:seen") as reward:
        assert await score(reward, "a") == [0.0]
    async with opened(f"{rewards}:seen", pass_env=["HF_TOKEN"]) as reward:
        assert await score(reward, "a") == [1.0]


@in_loop
async def test_error_says_how_to_pass_secret(
    rewards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "canary")
    async with opened(f"{rewards}:needing") as reward:
        with pytest.raises(RewardError, match=r'pass_env=\["OPENAI_API_KEY"\]') as error:
            await score(reward, "a")
    assert "canary" not in str(error.value)
    with pytest.raises(ConfigError, match=r'pass_env=\["OPENAI_API_KEY"\]'):
        await open_reward(RewardSettings(function=f"{rewards}:Client"), task=None)


@in_loop
async def test_withheld_names_are_logged(
    rewards: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary")
    with caplog.at_level("INFO", logger="paceline.reward.pool"):
        async with opened(f"{rewards}:seen"):
            pass
    assert "HF_TOKEN (reward.pass_env)" in caplog.text and "canary" not in caplog.text
