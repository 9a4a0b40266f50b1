"""Weights & Biases. Without an account or a connection, the run is recorded in `RUN_DIR/wandb` and
`wandb sync` uploads it later. WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE and the like have their usual
meaning."""

import logging
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import wandb

from paceline.observe.trackers import COLUMNS, PROJECT, TrackedRun

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 20.0  # also the longest that an exiting process waits for a silent server
UPLOAD_TIMEOUT_S = 12  # at the end of a run; less than Tracker.close_timeout_s


class WandbRun:
    def __init__(self, run: Any) -> None:
        self.run_id: str = run.id
        self._run = run
        self._step = int(run.step)
        # An evaluation may be complete after later steps, and W&B accepts no step before its last.
        run.define_metric("evaluation/*", step_metric="evaluation/step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = max(self._step, step)
        self._run.log(dict(metrics), step=self._step)

    def log_samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        table = wandb.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
        self._step = max(self._step, step)
        self._run.log({"samples": table}, step=self._step)

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update({f"summary/{name}": value for name, value in summary.items()})

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


def open_run(run: TrackedRun) -> WandbRun:
    """Open the run online if there is an account, otherwise offline."""
    session = wandb.setup(wandb.Settings(silent=True))
    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return WandbRun(_init(run, None))
    if not wandb.login(prompt=False, verify=False):
        reason = "wandb has no API key (wandb login)"
    elif problem := _unreachable(session.settings.base_url):
        reason = f"the server of wandb did not respond ({problem})"
    else:
        return WandbRun(_init(run, "allow"))
    folder = run.run_dir / "wandb"
    log.warning("%s: the run is recorded in %s; upload it with: wandb sync DIR", reason, folder)
    return WandbRun(_init(run, None, "offline"))


def _unreachable(url: str) -> str:
    """Return why the server cannot be reached, if so.

    wandb.init would find out, but an ID that it has failed with cannot be used offline.
    """
    try:
        urllib.request.urlopen(url, timeout=CONNECT_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        return ""  # a reply
    except OSError as error:
        return str(error)
    return ""


def _init(
    run: TrackedRun, resume: Literal["allow"] | None, mode: Literal["offline"] | None = None
) -> Any:
    return wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=os.environ.get("WANDB_NAME", run.name),
        id=run.run_id,
        resume=resume,
        mode=mode,
        dir=str(run.run_dir),
        config=run.config,
        settings=wandb.Settings(
            silent=True,
            console="off",  # the live panel stays in the terminal
            init_timeout=CONNECT_TIMEOUT_S,
            finish_timeout=UPLOAD_TIMEOUT_S,
        ),
    )
