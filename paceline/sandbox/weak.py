"""Limits without a sandbox, where bubblewrap does not work: for code that is only careless."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from paceline.sandbox.bubblewrap import ENVIRONMENT, launch
from paceline.sandbox.supervisor import Limits, Result, supervise

LACKS = (
    "the program can use the network, read and change every file that you can, send signals to "
    "your processes and leave a daemon behind"
)


def run_weakly(code: str, stdin: str, limits: Limits) -> Result:
    """Run the code with limits, a clean environment and no inherited descriptor."""
    ready, started = os.pipe()
    with (
        tempfile.TemporaryDirectory(prefix="paceline-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as given,
        open(ready, closefd=True),
    ):
        program = Path(folder, "program.py")
        program.write_text(code, encoding="utf-8", errors="replace")
        given.write(stdin.encode(errors="replace"))
        given.seek(0)
        with open(started, "wb", buffering=0):
            process = subprocess.Popen(
                [
                    *launch(sys.executable, started, 0, limits, 0),
                    *(sys.executable, "-I", "-B", str(program)),
                ],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[started],
                start_new_session=True,
                env=ENVIRONMENT | {"HOME": folder, "TMPDIR": folder},
                cwd=folder,
            )
        return supervise(process, ready, limits, "weak")
