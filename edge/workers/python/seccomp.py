"""What the kernel refuses a Python Worker: a filter of system calls, as bubblewrap takes it. Pure.

Processes above all: a thread may be started, a process may not, so that no fork bomb goes off in
the time between two looks of the host. Then what no Worker needs and what has been a way out of
sandboxes or into memory that no limit counts. `execve` stays: bubblewrap itself needs it, and it
makes no second process.
"""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass
from typing import Final

_AF_UNIX = 1
_CLONE_THREAD = 0x10000
_X32 = 0x40000000
"""Added to the numbers of a second set of calls on x86-64."""
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST = 0, 4, 16
"""Places in `struct seccomp_data`; of the first argument its lower half."""
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


@dataclass(frozen=True, slots=True)
class _Machine:
    """`audit`: its AUDIT_ARCH. `denied`: numbers of the calls that fail with EPERM."""

    audit: int
    clone: int
    socket: int
    denied: dict[str, int]


CLONE3: Final = 435
_NEWER = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
    "pidfd_open": 434, "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442,
    "quotactl_fd": 443, "memfd_secret": 447,
}  # fmt: skip
"""The same on all machines."""
MACHINES: Final = {
    "x86_64": _Machine(
        0xC000003E, 56, 41,
        _NEWER | {
            "fork": 57, "vfork": 58, "ptrace": 101, "process_vm_readv": 310,
            "process_vm_writev": 311, "kcmp": 312, "mount": 165, "umount2": 166,
            "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308, "add_key": 248,
            "request_key": 249, "keyctl": 250, "bpf": 321, "perf_event_open": 298,
            "userfaultfd": 323, "kexec_load": 246, "kexec_file_load": 320, "init_module": 175,
            "finit_module": 313, "delete_module": 176, "name_to_handle_at": 303,
            "open_by_handle_at": 304, "fanotify_init": 300, "quotactl": 179, "reboot": 169,
            "swapon": 167, "swapoff": 168, "acct": 163, "settimeofday": 164, "clock_settime": 227,
            "memfd_create": 319, "shmget": 29, "msgget": 68, "semget": 64,
        },
    ),
    "aarch64": _Machine(
        0xC00000B7, 220, 198,
        _NEWER | {
            "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
            "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "unshare": 97,
            "setns": 268, "add_key": 217, "request_key": 218, "keyctl": 219, "bpf": 280,
            "perf_event_open": 241, "userfaultfd": 282, "kexec_load": 104, "kexec_file_load": 294,
            "init_module": 105, "finit_module": 273, "delete_module": 106,
            "name_to_handle_at": 264, "open_by_handle_at": 265, "fanotify_init": 262,
            "quotactl": 60, "reboot": 142, "swapon": 224, "swapoff": 225, "acct": 89,
            "settimeofday": 170, "clock_settime": 112, "memfd_create": 279, "shmget": 194,
            "msgget": 186, "semget": 190,
        },
    ),
}  # fmt: skip


def program(machine: str) -> bytes | None:
    """An array of `struct sock_filter` for `platform.machine()`; None for one that is not known."""
    known = MACHINES.get(machine)
    if known is None:
        return None
    lines: list[_Line] = [
        _Line(_LOAD, _ARCH),
        _Line(_EQUAL, known.audit, no="kill"),
        _Line(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        lines.append(_Line(_AT_LEAST, _X32, yes="unknown"))
    lines += [
        _Line(_EQUAL, CLONE3, yes="unknown"),  # its flags lie in memory; libraries then use clone
        _Line(_EQUAL, known.clone, yes="clone"),
        _Line(_EQUAL, known.socket, yes="socket"),
        *(_Line(_EQUAL, number, yes="refuse") for number in sorted(known.denied.values())),
        _Line(_RETURN, _ALLOW, label="allow"),
        _Line(_LOAD, _FIRST, label="clone"),
        _Line(_ANY_BIT, _CLONE_THREAD, yes="allow_2", no="refuse"),
        _Line(_LOAD, _FIRST, label="socket"),
        _Line(_EQUAL, _AF_UNIX, yes="allow_2", no="family"),
        _Line(_RETURN, _ALLOW, label="allow_2"),  # a jump only leads forward
        _Line(_RETURN, _ERRNO | errno.EPERM, label="refuse"),
        _Line(_RETURN, _ERRNO | errno.ENOSYS, label="unknown"),
        _Line(_RETURN, _ERRNO | errno.EAFNOSUPPORT, label="family"),
        _Line(_RETURN, _KILL, label="kill"),
    ]
    return _assembled(lines)


@dataclass(frozen=True, slots=True)
class _Line:
    """`yes` and `no` are labels of later lines; without one the next line follows."""

    code: int
    value: int
    yes: str = ""
    no: str = ""
    label: str = ""


def _assembled(lines: list[_Line]) -> bytes:
    places = {line.label: at for at, line in enumerate(lines) if line.label}

    def jump(at: int, label: str) -> int:
        return places[label] - at - 1 if label else 0

    return b"".join(
        struct.pack("=HBBI", line.code, jump(at, line.yes), jump(at, line.no), line.value)
        for at, line in enumerate(lines)
    )
