"""The filter of system calls, run as the kernel runs it."""

from __future__ import annotations

import errno
import struct

import pytest

from edge.workers.python.seccomp import CLONE3, MACHINES, program

ALLOW, KILL = 0x7FFF0000, 0x80000000


def refusal(number: int) -> int:
    return 0x00050000 | number


def run(code: bytes, *, arch: int, number: int, first: int = 0) -> int:
    """What the program returns for one call."""
    data = struct.pack("=IIQQ", number, arch, 0, first)
    lines = list(struct.iter_unpack("=HBBI", code))
    at, word = 0, 0
    while True:
        operation, yes, no, value = lines[at]
        at += 1
        if operation == 0x20:
            (word,) = struct.unpack_from("=I", data, value)
        elif operation == 0x06:
            return int(value)
        else:
            holds = {0x15: word == value, 0x35: word >= value, 0x45: bool(word & value)}[operation]
            at += yes if holds else no


@pytest.mark.parametrize("machine", sorted(MACHINES))
def test_what_is_refused_and_what_is_not(machine: str) -> None:
    code, known = program(machine), MACHINES[machine]
    assert code is not None

    def says(number: int, first: int = 0) -> int:
        return run(code, arch=known.audit, number=number, first=first)

    assert {says(number) for number in known.denied.values()} == {refusal(errno.EPERM)}
    assert says(CLONE3) == refusal(errno.ENOSYS)
    assert says(known.clone, 0x11) == refusal(errno.EPERM), "a process"
    assert says(known.clone, 0x3D0F00) == ALLOW, "a thread, as pthread_create asks for one"
    assert says(known.socket, 1) == ALLOW
    assert says(known.socket, 2) == says(known.socket, 40) == refusal(errno.EAFNOSUPPORT)
    special = {*known.denied.values(), CLONE3, known.clone, known.socket}
    assert {says(number) for number in range(460) if number not in special} == {ALLOW}
    assert run(code, arch=0x40000003, number=1) == KILL, "calls of another machine"


def test_the_second_set_of_calls_is_not_there() -> None:
    code = program("x86_64")
    assert code is not None
    assert run(code, arch=0xC000003E, number=0x40000000 + 57) == refusal(errno.ENOSYS)
    assert program("abacus") is None
