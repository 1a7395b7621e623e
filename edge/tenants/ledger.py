"""What the requests of this process have reserved, on the counts that all processes of a state
folder share.

Reserved at the start, settled at the end; both are a few words on the board. A process that dies
leaves what it had reserved counted, since nobody knows what was delivered, until the windows of
those requests are over; its streams end with it.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from core.errors import ConfigError, LimitsUnavailable
from edge.tenants.board import Board, Page
from edge.tenants.meter import Fits, Kind, Limit, Meter, TooMany, Verdict, decide

_log = logging.getLogger("skerry.budget")

AGAIN_S = 1.0
"""Between two looks at a board that could not be opened."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that wants in. `leased`: a window grants what was leased for it, not its limit.
    `max_streams` None: its stream is counted, not limited here. `final`: it is used at once, by
    `limits` alone, with nothing to settle later."""

    id: str
    tenant: str
    tokens: int
    limits: Sequence[Limit]
    max_streams: int | None
    leased: bool
    final: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """`meters` are after the reservation where the verdict is `Fits`, else as they were found."""

    verdict: Verdict
    meters: Mapping[Kind, Meter]


@dataclass(frozen=True, slots=True)
class _Reserved:
    tenant: str
    step: int
    day: int
    tokens: int


class Ledger:
    """A board that cannot be had now is looked for again with the requests that need it: these are
    refused meanwhile. All methods but the constructor raise LimitsUnavailable."""

    def __init__(self, path: Path, *, ticks: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigError where the file cannot be used."""
        self._path = path
        self._ticks = ticks
        self._reserved: dict[str, _Reserved] = {}
        self._board: Board | None = None
        self._closed = False
        self._looked = float("-inf")
        try:
            self._board = Board(path)
        except LimitsUnavailable as error:
            _log.error("no ledger of limits yet why=%s", error.message)
            self._looked = ticks()
        self._provisional = secrets.token_hex(8)

    @property
    def name(self) -> str:
        """This ledger among all of the world; kept in the file, and drawn anew until that can be
        read."""
        return self._provisional if self._board is None else self._board.name

    def close(self) -> None:
        """Idempotent."""
        self._closed = True
        if self._board is not None:
            self._board.close()
        self._board = None

    def reserve(self, ask: Ask, now: float) -> Reply:
        """Reserve all that `ask` needs, or nothing."""
        board = self._here()
        with board.page(ask.tenant, now) as page:
            meters = {limit.kind: _meter(page, limit, leased=ask.leased) for limit in ask.limits}
            verdict = self._decide(board, page, ask, meters)
            if not isinstance(verdict, Fits):
                return Reply(verdict, meters)
            if ask.final:
                for limit in ask.limits:
                    page.count(limit.kind, _present(page, limit), limit.need(ask.tokens))
            else:
                one = _Reserved(ask.tenant, page.step, page.day, ask.tokens)
                _count(page, one, ask.tokens, 1)
                page.add_stream(board.seat, 1)
                self._reserved[ask.id] = one
        for limit in ask.limits:
            meters[limit.kind].counted[-1] += limit.need(ask.tokens)
        return Reply(verdict, meters)

    def adjust(self, request_id: str, tokens: int, now: float) -> None:
        """The reservation is for `tokens` from now on, also where that is more than was free."""
        one = self._reserved.get(request_id)
        if one is not None:
            with self._here().page(one.tenant, now) as page:
                _count(page, one, tokens - one.tokens, 0)
                self._reserved[request_id] = replace(one, tokens=tokens)

    def settle(self, request_id: str, tokens: int, now: float, *, counts: bool = True) -> bool:
        """End a reservation with what was used; `counts` False gives the request itself back too.
        False when there is none (any more): settling twice changes nothing."""
        one = self._reserved.get(request_id)
        if one is None:
            return False
        board = self._here()
        with board.page(one.tenant, now) as page:
            del self._reserved[request_id]
            _count(page, one, tokens - one.tokens, int(counts) - 1)
            page.add_stream(board.seat, -1)
        return True

    def correct_day(self, tenant: str, day: int, tokens: int, now: float) -> None:
        """`tokens` more, or fewer, were used on `day` than were charged, while it lasts."""
        with self._here().page(tenant, now) as page:
            page.count(Kind.DAY, day, tokens)

    def meter(self, tenant: str, limit: Limit, now: float, *, leased: bool = False) -> Meter:
        with self._here().page(tenant, now) as page:
            return _meter(page, limit, leased=leased)

    def granted(self, tenant: str, limit: Limit, window: int, now: float) -> int:
        with self._here().page(tenant, now) as page:
            return page.granted(limit.kind, window)

    def grant(
        self, tenant: str, limit: Limit, window: int, granted: int, elsewhere: int, now: float
    ) -> None:
        """What this ledger has leased of a window so far, by Redis's count; it never shrinks."""
        with self._here().page(tenant, now) as page:
            page.grant(limit.kind, window, granted, elsewhere)

    def open_streams(self, tenant: str, now: float) -> int:
        with self._here().page(tenant, now) as page:
            return sum(page.streams())

    def _decide(self, board: Board, page: Page, ask: Ask, meters: Mapping[Kind, Meter]) -> Verdict:
        def verdict() -> Verdict:
            streams = sum(page.streams()) if ask.max_streams is not None else 0
            return decide(
                ask.limits,
                meters,
                tokens=ask.tokens,
                open_streams=streams,
                max_streams=ask.max_streams,
            )

        found = verdict()
        if isinstance(found, TooMany) and _buried(board, page):
            found = verdict()
        return found

    def _here(self) -> Board:
        if self._board is not None:
            return self._board
        if self._closed:
            raise LimitsUnavailable("the ledger of limits is closed")
        if self._ticks() - self._looked < AGAIN_S:
            raise LimitsUnavailable("the ledger of limits is not there yet", retry_after_s=AGAIN_S)
        self._looked = self._ticks()
        try:
            self._board = Board(self._path)
        except ConfigError as error:
            raise LimitsUnavailable(str(error), retry_after_s=AGAIN_S) from error
        return self._board


def _meter(page: Page, limit: Limit, *, leased: bool) -> Meter:
    counted = page.counted(limit.kind)
    if not leased:
        return Meter(counted, limit.amount)
    granted = page.granted(limit.kind, _present(page, limit))
    return Meter(counted, granted, page.elsewhere(limit.kind), leased=True)


def _present(page: Page, limit: Limit) -> int:
    return page.day if limit.kind is Kind.DAY else page.step


def _count(page: Page, one: _Reserved, tokens: int, requests: int) -> None:
    page.count(Kind.REQUESTS, one.step, requests)
    page.count(Kind.TOKENS, one.step, tokens)
    page.count(Kind.DAY, one.day, tokens)


def _buried(board: Board, page: Page) -> bool:
    """End the streams of processes that died; whether there were any."""
    dead = [seat for seat, open_ in enumerate(page.streams()) if open_ and not board.is_alive(seat)]
    for seat in dead:
        page.forget_streams(seat)
    return bool(dead)
