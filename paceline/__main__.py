"""Entry point of `python -m paceline`, the same as the `paceline` command."""

from paceline.cli import app

app(prog_name="paceline")
