"""Virtual time for tests: sleeping takes no time, so thousands of runs take seconds."""

from paceline.simulator.clock import run_virtual

__all__ = ["run_virtual"]
