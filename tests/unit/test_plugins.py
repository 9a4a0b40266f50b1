"""User code named by a setting: how it is found, compared, written to JSON and sent to workers."""

import copy
import functools
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib import metadata
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.plugins import Plugin, PluginError, find_callable
from paceline.settings import Settings

GROUP = "paceline.losses"


class Section(Settings):
    loss: Plugin | None = None


def twice(x: int) -> int:
    return 2 * x


class Scaler:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, x: int) -> int:
        return self.factor * x


def write(folder: Path, text: str) -> str:
    file = folder / "code.py"
    file.write_text(text)
    return f"{file}:f"


def elsewhere(plugin: Plugin, folder: Path) -> subprocess.CompletedProcess[str]:
    """Load a plugin in a process that cannot import the tests, and call it with 3."""
    message = folder / "plugin.pickle"
    message.write_bytes(pickle.dumps(plugin))
    program = f"import pickle; print(pickle.load(open({str(message)!r}, 'rb')).load('g')(3))"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd="/")


def test_file_spec_loads_function(tmp_path: Path) -> None:
    plugin = Plugin.of(write(tmp_path, "def f(x): return x + 1"))
    assert plugin.load(GROUP)(3) == 4 and str(plugin).endswith("code.py:f")


def test_module_spec_loads_function() -> None:
    assert Plugin.of("math:sqrt").load(GROUP)(9) == 3


def test_entry_point_loads_function(monkeypatch: pytest.MonkeyPatch) -> None:
    points = EntryPoints([EntryPoint("root", "math:sqrt", GROUP)])
    monkeypatch.setattr(metadata, "entry_points", lambda group: points.select(group=group))
    assert Plugin.of("root").load(GROUP)(9) == 3
    with pytest.raises(PluginError, match="did you mean 'root'"):
        Plugin.of("rot").load(GROUP)


def test_unknown_name_suggests_built_in() -> None:
    with pytest.raises(ConfigError, match=rf"'clipp' .* point of '{GROUP}'; did you mean 'clip'"):
        Plugin.of("clipp").load(GROUP, ["clip", "pg"])


@pytest.mark.parametrize("wrong", ["", 3, None])
def test_plugin_rejects_what_is_neither_name_nor_callable(wrong: Any) -> None:
    with pytest.raises(PluginError, match=r"expected 'file\.py:function'"):
        Plugin.of(wrong)


def test_missing_file_is_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no file '.*gone.py'"):
        Plugin.of(f"{tmp_path}/gone.py:f").load(GROUP)


def test_exception_at_import_becomes_config_error(tmp_path: Path) -> None:
    spec = write(tmp_path, "import nothing_like_this")
    with pytest.raises(ConfigError, match=r"importing '.*code.py:f' raised ModuleNotFoundError"):
        Plugin.of(spec).load(GROUP)


def test_file_that_ends_program_is_config_error(tmp_path: Path) -> None:
    spec = write(tmp_path, "def f(x): ...\nraise SystemExit(0)")
    message = r"importing '.*code.py:f' raised SystemExit: 0; put what only .* __name__ =="
    with pytest.raises(ConfigError, match=message):
        Plugin.of(spec).load(GROUP)
    with pytest.raises(PluginError, match=message):
        find_callable(spec)


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (twice, "tests.unit.test_plugins:twice"),
        (Scaler(3), "tests.unit.test_plugins:Scaler"),
        (functools.partial(twice, 1), "tests.unit.test_plugins:twice"),
    ],
)
def test_callable_is_named_by_module_with_function(code: Callable[..., Any], name: str) -> None:
    assert str(Plugin.of(code)) == name and repr(Plugin.of(code)) == repr(name)


def test_plugins_are_equal_by_name() -> None:
    assert Plugin.of(twice) == Plugin.of("tests.unit.test_plugins:twice")
    assert len({Plugin.of(twice), Plugin.of(twice), Plugin.of("math:sqrt")}) == 2
    assert Plugin.of("math:sqrt") != "math:sqrt"


@pytest.mark.parametrize("code", [twice, "tests.unit.test_plugins:twice"])
def test_setting_accepts_callable_or_name(code: Any) -> None:
    section = Section.model_validate({"loss": code})
    assert section.model_dump(mode="json") == {"loss": "tests.unit.test_plugins:twice"}
    assert section.loss is not None and section.loss.load(GROUP)(2) == 4


def test_copy_keeps_callable_that_cannot_be_pickled() -> None:
    lock = threading.Lock()
    plugin = Plugin.of(lambda: lock)
    assert copy.deepcopy(plugin) is plugin and copy.copy(plugin) is plugin


@pytest.mark.parametrize("code", [twice, Scaler(2), lambda x: twice(x)])
def test_callable_reaches_process_without_its_module(
    code: Callable[..., Any], tmp_path: Path
) -> None:
    result = elsewhere(Plugin.of(code), tmp_path)
    assert result.stdout == "6\n", result.stderr


def test_received_callable_can_be_sent_on() -> None:
    plugin = Plugin.of(lambda x: x + 1)
    for _ in range(2):
        plugin = pickle.loads(pickle.dumps(plugin))
    assert plugin.load(GROUP)(1) == 2


def test_callable_of_installed_package_is_sent_by_reference() -> None:
    assert len(pickle.dumps(Plugin.of(copy.copy))) < 200


def test_file_reaches_machine_that_does_not_have_it(tmp_path: Path) -> None:
    plugin = Plugin.of(write(tmp_path, "def g(x): return x\ndef f(x): return g(x) + 1"))
    data = pickle.dumps(plugin)
    (tmp_path / "code.py").unlink()
    assert pickle.loads(data).load(GROUP)(3) == 4


def test_callable_that_cannot_be_pickled_is_config_error() -> None:
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="cannot be sent to worker processes"):
        pickle.dumps(Plugin.of(lambda: lock))


def test_import_does_not_wait_for_cloudpickle() -> None:
    heavy = {"cloudpickle", "pydantic", "torch"}
    program = f"import sys, paceline.plugins; print({heavy!r} & sys.modules.keys())"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout == "set()\n", result.stderr
