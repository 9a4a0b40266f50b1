"""Deadlines do not pass while the process is stopped."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

PROGRAM = textwrap.dedent("""
    import asyncio
    from paceline.awake import AwakeLoop

    async def main():
        async with asyncio.timeout(3.0):
            print("begun", flush=True)
            for _ in range(10):
                await asyncio.sleep(0.1)
        print("done", flush=True)
        try:
            async with asyncio.timeout(0.2):
                await asyncio.sleep(60)
        except TimeoutError:
            print("and deadlines still pass", flush=True)

    with asyncio.Runner(loop_factory=AwakeLoop) as runner:
        runner.run(main())
""")


def test_no_time_passes_while_the_process_is_stopped() -> None:
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(4)  # longer than the deadline
        process.send_signal(signal.SIGCONT)
        assert process.stdout.read() == "done\nand deadlines still pass\n"
