"""The tree of errors: whole on the wire, stable codes, statuses that mean what they say."""

from __future__ import annotations

import pytest

from core import errors
from core.errors import BY_CODE, InternalError, RequestError, from_fault, to_fault
from core.events import Fault


def _leaves(base: type[RequestError]) -> set[type[RequestError]]:
    found = {base} if "code" in vars(base) else set()
    for child in base.__subclasses__():
        found |= _leaves(child)
    return found


def test_every_class_with_a_code_is_found_by_it() -> None:
    assert set(BY_CODE.values()) == _leaves(RequestError)
    assert all(kind.code == code for code, kind in BY_CODE.items())
    assert len(BY_CODE) == 32


@pytest.mark.parametrize("code", sorted(BY_CODE))
def test_there_and_back(code: str) -> None:
    kind = BY_CODE[code]
    for error in (kind("why"), kind("why", param="stop", retry_after_s=2.5)):
        again = from_fault(to_fault(error))
        assert type(again) is type(error)
        assert (again.message, again.param, again.retry_after_s, str(again)) == (
            error.told or "why",
            error.param,
            error.retry_after_s,
            error.told or "why",
        )
        assert to_fault(error).retryable is error.retryable


def test_callers_are_not_told_who_was_lost() -> None:
    """Names, pids and last words are for the operator's log."""
    error = errors.NodeLost("rank 0 of node home-1 (pid 879) was killed; its last words: oh")
    assert "home-1 (pid 879)" in str(error)
    fault = to_fault(error)
    assert (fault.code, fault.message) == (
        "node_lost",
        "the node that computed this answer was lost",
    )


@pytest.mark.parametrize("code", sorted(BY_CODE))
def test_whose_fault_it_is_shows_in_the_status(code: str) -> None:
    kind = BY_CODE[code]
    assert 400 <= kind.http_status < 600
    if issubclass(kind, errors.CallerError):
        assert kind.http_status < 500
        assert not kind.retryable
    else:
        assert kind.http_status >= 500 or kind is errors.NoCapacity
    assert isinstance(kind.cloudflare_code, int)
    assert kind.grpc_code.isupper()


def test_an_unknown_code_of_a_newer_peer() -> None:
    error = from_fault(Fault(code="too_windy", message="wait for calm", retryable=True))
    assert type(error) is InternalError
    assert error.message == "too_windy: wait for calm"
