"""The cache of models in the temporary directory, which all users share."""

import os
import tempfile
from pathlib import Path

import pytest

from paceline.data.tiny import cached_model
from paceline.errors import ModelError
from paceline.model import cache
from paceline.model.cache import fallback_folder, writable_cache

OTHER_USER = 54321


@pytest.fixture
def fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory in the temporary directory, used because there is no home directory."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "home").write_text("a file, so that nothing can be created in it")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "home" / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return fallback_folder()


def plant(folder: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the directory as another user would, with a model in it; return where it is used."""
    if how == "owner":
        monkeypatch.setattr(os, "getuid", lambda: OTHER_USER)  # the files belong to the real user
        folder = fallback_folder()
    real = folder.with_name("planted") if how == "link" else folder
    (real / "model").mkdir(parents=True)
    if how == "link":
        folder.symlink_to(real)
    real.chmod(0o777 if how == "mode" else 0o700)
    return folder


@pytest.mark.parametrize("how", ["owner", "link", "mode"])
def test_model_in_directory_of_other_user_is_rejected(
    fallback: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = plant(fallback, how, monkeypatch)
    with pytest.raises(ModelError, match=rf"{planted} .*set PACELINE_CACHE"):
        cached_model("model", lambda folder: None)
    assert planted not in cache.readable_caches()


@pytest.mark.parametrize("how", ["owner", "link", "mode"])
def test_directory_of_other_user_is_rejected_when_there_is_no_home(
    fallback: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = plant(fallback, how, monkeypatch)
    monkeypatch.delenv("PACELINE_CACHE")
    monkeypatch.setattr("paceline.model.cache.cache_folder", lambda: planted)
    assert cache.readable_caches() == []
    with pytest.raises(ModelError, match="cannot be trusted"):
        writable_cache()


def test_directory_in_temporary_directory_is_private(fallback: Path) -> None:
    assert writable_cache() == fallback
    assert fallback.stat().st_mode & 0o777 == 0o700
    assert cached_model("model", lambda folder: None) == fallback / "model"
    assert fallback in cache.readable_caches()


def test_directory_of_this_user_is_made_private_when_group_can_write(fallback: Path) -> None:
    (fallback / "model").mkdir(parents=True)
    fallback.chmod(0o775)  # as an earlier version made it with a umask of 002
    assert writable_cache() == fallback
    assert fallback.stat().st_mode & 0o777 == 0o700
    assert fallback in cache.readable_caches()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of another user")
def test_directory_is_rejected_when_it_contains_files_of_other_user(fallback: Path) -> None:
    (fallback / "model").mkdir(parents=True)
    os.chown(fallback / "model", OTHER_USER, OTHER_USER)
    fallback.chmod(0o775)
    with pytest.raises(ModelError, match="cannot be trusted"):
        writable_cache()
    assert fallback not in cache.readable_caches()
