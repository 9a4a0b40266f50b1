"""Workers on a Ray cluster: an existing one, or one started on this machine for the run.

This is the only package that imports ray. Ray starts processes and carries messages. Paceline adds
what Ray does not guarantee: numbered and repeated messages, and silence that counts as death
(worker.py).
"""

from paceline.errors import ConfigError

try:
    import ray  # noqa: F401
except ImportError as error:
    raise ConfigError(
        f"cluster = 'ray' needs Ray ({error}): pip install 'paceline[ray]'"
    ) from error
