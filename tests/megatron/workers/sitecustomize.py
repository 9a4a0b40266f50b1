"""Installs the CPU patches in a test's worker processes: Python imports this module at startup."""

from tests.megatron.cpu_shim import install

install()
