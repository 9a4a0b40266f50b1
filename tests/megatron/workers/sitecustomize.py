"""Python imports this at start where it is on the path: worker processes of a test's run get the CPU shim that way."""

from tests.megatron.cpu_shim import install

install()
