"""System calls that programs in the sandbox cannot make, as a filter for the kernel (seccomp).

Most of them need privileges that the program lacks. The filter keeps it from the code of the kernel
in which such checks have failed before, and from new namespaces, in which it would be root.
"""

import errno
import platform
import struct

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NEW_NAMESPACE = 0x7E020000  # the CLONE_NEW* flags
FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6; others, such as AF_VSOCK, leave the namespace

# The kernel's name of the architecture, and the numbers of clone, socket and the refused calls that
# are not numbered alike everywhere: ptrace, process_vm_readv, process_vm_writev, kcmp, mount,
# umount2, pivot_root, chroot, unshare, setns, keyctl, add_key, request_key, bpf, perf_event_open,
# userfaultfd, open_by_handle_at, personality, and the calls for kernels and their modules.
MACHINES = {
    "x86_64": (
        *(0xC000003E, 56, 41),
        *((101, 310, 311, 312, 165, 166, 155, 161, 272, 308, 250, 248, 249, 321, 298, 323, 304)),
        *(135, 246, 320, 175, 313, 176),
    ),
    "aarch64": (
        *(0xC00000B7, 220, 198),
        *((117, 270, 271, 272, 40, 39, 41, 51, 97, 268, 219, 217, 218, 280, 241, 282, 265)),
        *(92, 104, 294, 105, 273, 106),
    ),
}
# io_uring_*, the mount calls since open_tree, pidfd_getfd, mount_setattr
REFUSED_EVERYWHERE = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442)
CLONE3 = 435  # its flags are out of reach of a filter; the C library falls back to clone


def program_filter(machine: str | None = None) -> bytes | None:
    """Return the filter as the kernel reads it; None for a machine that it is not written for."""
    numbers = MACHINES.get(machine or platform.machine())
    if numbers is None:
        return None
    architecture, clone, socket, *refused = numbers
    steps = [
        _step(LOAD, ARCHITECTURE),
        *(_step(EQUAL, architecture, yes=1), _step(RETURN, KILL)),
        _step(LOAD, NUMBER),
        *(_step(AT_LEAST, 0x40000000, no=1), _step(RETURN, KILL)),  # x32 calls of x86
        *(_step(EQUAL, CLONE3, no=1), _step(RETURN, ERRNO | errno.ENOSYS)),
    ]
    for number in (*refused, *REFUSED_EVERYWHERE):
        steps += [_step(EQUAL, number, no=1), _step(RETURN, ERRNO | errno.EPERM)]
    steps += [
        *(_step(EQUAL, clone, no=4), _step(LOAD, FIRST_ARGUMENT)),
        *(_step(ANY_BIT, NEW_NAMESPACE, no=1), _step(RETURN, ERRNO | errno.EPERM)),
        _step(RETURN, ALLOW),
        *(_step(EQUAL, socket, yes=1), _step(RETURN, ALLOW), _step(LOAD, FIRST_ARGUMENT)),
    ]
    for family in FAMILIES:
        steps += [_step(EQUAL, family, no=1), _step(RETURN, ALLOW)]
    return b"".join([*steps, _step(RETURN, ERRNO | errno.EAFNOSUPPORT)])


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    """Return one instruction; `yes` and `no` are the instructions to skip after a comparison."""
    return struct.pack("=HBBI", code, yes, no, value)
