"""The `paceline` command. Each module has some of its subcommands and what they print.

Large dependencies are imported where they are used, so `paceline --help` does not import torch.
"""

# The order of these imports is the order of the commands in --help.
# isort: off
from paceline.cli import train
from paceline.cli import export
from paceline.cli import model
from paceline.cli import serve
from paceline.cli import translate
from paceline.cli import plan
from paceline.cli import inspect
from paceline.cli import trace
from paceline.cli import doctor
from paceline.cli import page
from paceline.cli import simulate
from paceline.cli import audit
from paceline.cli import jobs
# isort: on

from paceline.cli.app import app

__all__ = [
    "app",
    "audit",
    "doctor",
    "export",
    "inspect",
    "jobs",
    "model",
    "page",
    "plan",
    "serve",
    "simulate",
    "trace",
    "train",
    "translate",
]
