"""System calls that programs in the sandbox cannot make, as a filter for the kernel (seccomp).

Most of them need privileges that the program lacks. The filter keeps it from the code of the kernel
in which such checks have failed before, and from new namespaces, in which it would be root. Others
hold memory that belongs to no process, so that no limit would count it.
"""

import errno
import platform
import struct

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT, FOURTH_ARGUMENT = 0, 4, 16, 40  # in struct seccomp_data
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NEW_NAMESPACE = 0x7E020000  # the CLONE_NEW* flags
SHARED, ANONYMOUS = 0x01, 0x20  # flags of mmap
FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6; others, such as AF_VSOCK, leave the namespace

# The kernel's name of the architecture, and the numbers of clone, socket, mmap and of refused calls
# that are not numbered alike everywhere: ptrace, process_vm_readv, process_vm_writev, kcmp, mount,
# umount2, pivot_root, chroot, unshare, setns, keyctl, add_key, request_key, bpf, perf_event_open,
# userfaultfd, open_by_handle_at, personality, and the calls for kernels and their modules.
MACHINES = {
    "x86_64": (
        *(0xC000003E, 56, 41, 9),
        *((101, 310, 311, 312, 165, 166, 155, 161, 272, 308, 250, 248, 249, 321, 298, 323, 304)),
        *(135, 246, 320, 175, 313, 176),
    ),
    "aarch64": (
        *(0xC00000B7, 220, 198, 222),
        *((117, 270, 271, 272, 40, 39, 41, 51, 97, 268, 219, 217, 218, 280, 241, 282, 265)),
        *(92, 104, 294, 105, 273, 106),
    ),
}
# Calls for memory that stays when it is not mapped: memfd_create, shmget, msgget, semget, mq_open,
# vmsplice. Libraries expect them to be missing from some kernels and do without.
MISSING = {
    "x86_64": (319, 29, 68, 64, 240, 278),
    "aarch64": (279, 194, 186, 190, 180, 75),
}
MISSING_EVERYWHERE = (435, 447)  # clone3, whose flags a filter cannot read; memfd_secret
# io_uring_*, the mount calls since open_tree, pidfd_getfd, mount_setattr
REFUSED_EVERYWHERE = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442)


def program_filter(machine: str | None = None) -> bytes | None:
    """Return the filter as the kernel reads it; None for a machine that it is not written for."""
    machine = machine or platform.machine()
    if machine not in MACHINES:
        return None
    architecture, clone, socket, mmap, *refused = MACHINES[machine]
    steps = [
        _step(LOAD, ARCHITECTURE),
        *(_step(EQUAL, architecture, yes=1), _step(RETURN, KILL)),
        _step(LOAD, NUMBER),
        *(_step(AT_LEAST, 0x40000000, no=1), _step(RETURN, KILL)),  # x32 calls of x86
    ]
    for number in (*MISSING[machine], *MISSING_EVERYWHERE):
        steps += [_step(EQUAL, number, no=1), _step(RETURN, ERRNO | errno.ENOSYS)]
    for number in (*refused, *REFUSED_EVERYWHERE):
        steps += [_step(EQUAL, number, no=1), _step(RETURN, ERRNO | errno.EPERM)]
    steps += [
        *(_step(EQUAL, clone, no=4), _step(LOAD, FIRST_ARGUMENT)),
        *(_step(ANY_BIT, NEW_NAMESPACE, no=1), _step(RETURN, ERRNO | errno.EPERM)),
        _step(RETURN, ALLOW),
        # Shared memory without a file stays whole while one page of it is mapped.
        *(_step(EQUAL, mmap, no=5), _step(LOAD, FOURTH_ARGUMENT)),
        *(_step(ANY_BIT, SHARED, no=2), _step(ANY_BIT, ANONYMOUS, no=1)),
        *(_step(RETURN, ERRNO | errno.EPERM), _step(RETURN, ALLOW)),
        *(_step(EQUAL, socket, yes=1), _step(RETURN, ALLOW), _step(LOAD, FIRST_ARGUMENT)),
    ]
    for family in FAMILIES:
        steps += [_step(EQUAL, family, no=1), _step(RETURN, ALLOW)]
    return b"".join([*steps, _step(RETURN, ERRNO | errno.EAFNOSUPPORT)])


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    """Return one instruction; `yes` and `no` are the instructions to skip after a comparison."""
    return struct.pack("=HBBI", code, yes, no, value)
