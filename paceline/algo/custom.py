"""Custom advantages, losses and corrections: calls of user functions, with checked results.

A function names the parameters that it needs; docs/customization.md lists those that it may name.
Every failure is a ConfigError with the setting and the function, because the function is the value
of a setting.
"""

import os
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.algo.settings import BUILT_IN, GROUPS, AlgorithmSettings
from paceline.errors import ConfigError
from paceline.plugins import FAILURES, Plugin, PluginError, accepted
from paceline.printable import describe_error
from paceline.types import Batch

PARAMETERS = {
    "advantage": ("rewards", "groups", "lengths", "batch", "settings"),
    "loss": ("logprobs", "proximal", "advantages", "rows", "settings"),
    "correction": ("log_weight", "rows", "settings"),
}


def check_custom(settings: AlgorithmSettings) -> None:
    """Load every custom function, so that a wrong name or parameter fails before the run starts."""
    for setting in PARAMETERS:
        plugin = getattr(settings, setting)
        if isinstance(plugin, Plugin):
            _wanted(setting, plugin, _load(setting, plugin), PARAMETERS[setting])


def custom_advantage(
    plugin: Plugin, rewards: NDArray[np.float64], batch: Batch, settings: AlgorithmSettings
) -> NDArray[np.float64]:
    """Return the advantage of each token, 0 outside the mask: [T].

    The function returns one value per completion or one per token.
    """
    row = np.repeat(np.arange(batch.num_rows), batch.lengths)
    result = _call(
        "advantage",
        plugin,
        {
            "rewards": rewards,
            "groups": np.unique(batch.groups, return_inverse=True)[1],
            "lengths": np.bincount(row[batch.mask], minlength=batch.num_rows),
            "batch": batch,
            "settings": settings,
        },
    )
    rows, tokens = batch.num_rows, batch.num_tokens
    expected = f"{rows} numbers, one per completion, or {tokens}, one per token"
    try:
        values = np.asarray(result, np.float64)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor with a gradient
        _reject("advantage", plugin, f"returned {type(result).__name__}", expected)
    if values.shape not in ((rows,), (tokens,)):
        _reject("advantage", plugin, f"returned shape {values.shape}", expected)
    if not np.isfinite(values).all():
        _reject("advantage", plugin, "returned NaN or infinity", "finite numbers")
    if values.shape == (rows,):
        return np.where(batch.mask, np.repeat(values, batch.lengths), 0.0)
    outside = int(np.count_nonzero(values[~batch.mask]))
    if outside:
        found = f"returned an advantage for {outside} tokens that are not trained on"
        _reject("advantage", plugin, found, "0 where batch.mask is false")
    return values


def custom_loss(
    plugin: Plugin,
    logprobs: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    rows: Tensor,
    settings: AlgorithmSettings,
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token, and which tokens a clip affects: both [M]."""
    arguments = (logprobs, proximal, advantages, rows, settings)
    result = _call("loss", plugin, dict(zip(PARAMETERS["loss"], arguments, strict=True)))
    loss, clipped = (
        result
        if isinstance(result, tuple) and len(result) == 2
        else (result, torch.zeros_like(rows, dtype=torch.bool))
    )
    _check_tensor("loss", plugin, loss, logprobs)
    if logprobs.requires_grad and not loss.requires_grad:
        found = "returned a loss without a gradient"
        _reject("loss", plugin, found, "a loss computed from logprobs, without detach or no_grad")
    if (
        not isinstance(clipped, Tensor)
        or clipped.dtype != torch.bool
        or clipped.shape != rows.shape
    ):
        found = f"returned {_described(clipped)} as the second value"
        _reject("loss", plugin, found, f"a bool tensor of shape {tuple(rows.shape)}")
    return loss, clipped


def custom_weights(
    plugin: Plugin, log_weight: Tensor, rows: Tensor, settings: AlgorithmSettings
) -> Tensor:
    """Return the factor of each token's advantage: [M]."""
    arguments = (log_weight, rows, settings)
    weights = _call(
        "correction", plugin, dict(zip(PARAMETERS["correction"], arguments, strict=True))
    )
    _check_tensor("correction", plugin, weights, log_weight)
    if bool((weights < 0).any()):
        _reject("correction", plugin, "returned a negative weight", "factors of at least 0")
    checked: Tensor = weights.detach().to(log_weight.dtype)
    return checked


def _check_tensor(setting: str, plugin: Plugin, result: Any, like: Tensor) -> None:
    shape = tuple(like.shape)
    if (
        not isinstance(result, Tensor)
        or not result.is_floating_point()
        or result.shape != like.shape
    ):
        expected = f"a floating-point tensor of shape {shape}, one value per token"
        _reject(setting, plugin, f"returned {_described(result)}", expected)
    if result.device != like.device:
        found = f"returned a tensor on {result.device}"
        _reject(setting, plugin, found, f"a tensor on {like.device}, as its arguments")
    if not bool(torch.isfinite(result.detach()).all()) and bool(torch.isfinite(like).all()):
        # Log-probs that are not finite are no fault of the function; the update is then skipped.
        _reject(setting, plugin, "returned NaN or infinity", "finite numbers")


def _call(setting: str, plugin: Plugin, available: Mapping[str, Any]) -> Any:
    function = _load(setting, plugin)
    wanted = _wanted(setting, plugin, function, available)
    try:
        return function(**{name: available[name] for name in wanted})
    except (MemoryError, torch.OutOfMemoryError):
        raise  # the backend reports what holds the memory
    except FAILURES as e:
        raise ConfigError(
            f"{_name(setting, plugin)} raised {describe_error(e)} ({_place(e)})"
        ) from e


def _load(setting: str, plugin: Plugin) -> Callable[..., Any]:
    try:
        return plugin.load(GROUPS[setting], BUILT_IN[setting])
    except PluginError as problem:
        raise ConfigError(f"{_name(setting, plugin)}: {problem}") from problem


def _wanted(
    setting: str, plugin: Plugin, function: Callable[..., Any], available: Collection[str]
) -> list[str]:
    """Return the names of the available values that the function takes."""
    try:
        return accepted(function, available)
    except PluginError as problem:
        raise ConfigError(f"{_name(setting, plugin)} {problem}") from problem


def _reject(setting: str, plugin: Plugin, found: str, expected: str) -> NoReturn:
    raise ConfigError(f"{_name(setting, plugin)} {found}; expected {expected}")


def _name(setting: str, plugin: Plugin) -> str:
    return f"algorithm.{setting} = {str(plugin)!r}"


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__}"


def _place(error: BaseException) -> str:
    """Return the file and line of the user's code where the error occurred."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    if not frames:
        return "in its call"
    return f"{os.path.basename(frames[0].filename)}, line {frames[0].lineno}"
