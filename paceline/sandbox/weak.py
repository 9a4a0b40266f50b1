"""Limits without a sandbox, where bubblewrap does not work: for code that is only careless."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from paceline.sandbox.bubblewrap import ENVIRONMENT, launch
from paceline.sandbox.supervisor import Limits, Result, supervise

LACKS = (
    "the program can use the network, read and change every file that you can, send signals to "
    "your processes and leave a daemon behind"
)


def run_weakly(
    code: str, stdin: str | socket.socket, limits: Limits, ended: threading.Event | None = None
) -> Result:
    """Run the code with limits, a clean environment and no inherited descriptor."""
    with (
        tempfile.TemporaryDirectory(prefix="paceline-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as given,
        contextlib.ExitStack() as stack,
    ):
        program = Path(folder, "program.py")
        program.write_text(code, encoding="utf-8", errors="replace")
        if isinstance(stdin, str):
            given.write(stdin.encode(errors="replace"))
            given.seek(0)
        ready, started = os.pipe()
        stack.callback(os.close, ready)
        with open(started, "wb", buffering=0):
            process = subprocess.Popen(
                [
                    *launch(sys.executable, started, 0, limits, 0),
                    *(sys.executable, "-I", "-B", str(program)),
                ],
                stdin=given if isinstance(stdin, str) else stdin.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[started],
                start_new_session=True,
                env=ENVIRONMENT | {"HOME": folder, "TMPDIR": folder},
                cwd=folder,
            )
        if isinstance(stdin, socket.socket):
            stdin.close()  # so that the other program notices when this one ends
        return supervise(process, ready, limits, "weak", ended)
