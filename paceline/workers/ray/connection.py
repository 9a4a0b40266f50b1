"""The connection of this process to a Ray cluster, or to one that it starts on this machine."""

import ctypes
import logging
import os
import secrets
import signal
import socket
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants

from paceline.errors import ConfigError
from paceline.workers.cluster import available_cores

# Object store of a cluster that is started for the run: messages pass through it, weights do not.
STORE_BYTES = 200 << 20
GCS_TIMEOUT_S = 10  # Ray waits this long for a control service that died; its default is 60
LOCAL = ("local", "127.0.0.1", "localhost")


def join(address: str) -> None:
    """Connect, and keep our SIGTERM handler: Ray's would end the run without cleanup.

    This thread need not be the main thread, so the handler is set by the C function.
    """
    get, put = ctypes.pythonapi.PyOS_getsig, ctypes.pythonapi.PyOS_setsig
    get.argtypes, get.restype = [ctypes.c_int], ctypes.c_void_p
    put.argtypes, put.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    before = get(signal.SIGTERM)
    try:
        connect(address)
    finally:
        put(signal.SIGTERM, before)


def connect(address: str) -> None:
    """Connect to the cluster at `address`; "local": start one that only this machine reaches."""
    if ray.is_initialized():
        raise ConfigError(
            "Ray is already connected in this process; set ray.address to that cluster and let the "
            "run connect"
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
            # Otherwise Ray writes a permanent one to the user's home directory.
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        # As on macOS: listen to this machine only.
        usual = ray_constants.ENABLE_RAY_CLUSTER
        ray_constants.ENABLE_RAY_CLUSTER = False
        try:
            quiet["include_dashboard"] = False
            ray.init(
                address="local",
                num_cpus=len(available_cores()),
                object_store_memory=STORE_BYTES,
                _system_config={"gcs_rpc_server_reconnect_timeout_s": GCS_TIMEOUT_S},
                **quiet,
            )
        finally:
            ray_constants.ENABLE_RAY_CLUSTER = usual
        return
    host, _, port = address.rpartition(":")
    # Workers on other machines run the code that runs here.
    code = {} if host in LOCAL else {"py_modules": [str(Path(__file__).parents[2])]}
    try:
        if port.isdigit():
            # Ray itself would try for minutes.
            socket.create_connection((host, int(port)), timeout=5).close()
        ray.init(address=address, runtime_env=code, **quiet)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"ray.address = {address!r}: cannot connect to a Ray cluster ({error}); "
            "start one with: ray start --head"
        ) from error
