"""`python -m paceline` is the command line."""

from paceline.cli import app

app(prog_name="paceline")
