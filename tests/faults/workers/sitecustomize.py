"""Starts the witness in a test's worker processes: Python imports this module at startup."""

from tests.witness import install

install()
