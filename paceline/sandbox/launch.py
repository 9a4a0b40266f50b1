"""First program in the sandbox: sets the limits, gives up root and becomes the program to run.

It is started from its source, because the sandbox does not contain this package:
`python -c SOURCE READY_FD UID MEMORY CPU_S PROCESSES FILE_SIZE COMMAND...`, sizes in bytes. UID 0
keeps the user, PROCESSES 0 the limit that there is. A byte on READY_FD says that it got this far.
"""

import os
import resource
import sys
from contextlib import suppress

OPEN_FILES = 256


def main(ready: int, uid: int, limits: list[int], command: list[str]) -> None:
    memory, cpu_s, processes, file_size = limits
    for kind, limit, hard in (
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),  # SIGXCPU, then SIGKILL
        (resource.RLIMIT_FSIZE, file_size, file_size),
        (resource.RLIMIT_NOFILE, OPEN_FILES, OPEN_FILES),
        *([(resource.RLIMIT_NPROC, processes, processes)] if processes else []),
    ):
        with suppress(ValueError, OSError):  # there is a lower one, or the system has no such limit
            resource.setrlimit(kind, (limit, hard))
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    os.set_inheritable(ready, False)
    os.write(ready, b"1")
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), list(map(int, sys.argv[3:7])), sys.argv[7:])
