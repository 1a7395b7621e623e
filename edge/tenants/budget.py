"""What a request may use and did use: a tab, held from admission to its end.

Reserved at the start: one request, the prompt's tokens and the longest answer, in one step and
before any work. As soon as the region has counted the prompt, its number replaces the estimate (an
edge has no tokenizer), also where a limit is passed by the difference: then the tenant's next
request waits the longer. Settled at the end, whatever the end: a whole answer with its usage; one
that broke off with what was delivered; one that we failed before its caller was shown anything with
nothing; a caller that left before anything came with its prompt. A process that is killed leaves
what it had reserved, charged whole.

Order at the end of an answer: usage record, settlement, last event. So no usage is sent that the
ledger lacks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from core.config_tenants import Budgets as Settings
from core.errors import Cancelled, InternalError, RequestError
from core.events import Delta, Done
from core.types import GenerateRequest, Usage
from core.usage import UsageRecord, UsageWriter
from edge.gateway import Batch
from edge.routing.learned import BytesPerToken, TemplateTokens
from edge.tenants.door import Caller
from edge.tenants.ledger import Ask, Reply
from edge.tenants.meter import Fits, Kind, limits_of
from edge.tenants.pool import Pool
from edge.tenants.refusals import limit_headers, refusal
from edge.tenants.size import answer_tokens, prompt_bytes, prompt_tokens

_log = logging.getLogger("skerry.budget")


@dataclass(frozen=True, slots=True)
class Charge:
    """What was taken of a day's quota for each of several requests."""

    day: int
    tokens: tuple[int, ...]


class Budgets:
    """What the tabs of one process share. `usage` is also for records of requests without a tab."""

    def __init__(
        self,
        *,
        pool: Pool,
        settings: Settings,
        usage: UsageWriter,
        edge: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self.pool = pool
        self.usage = usage
        self.edge = edge
        self.clock = clock
        self.bytes = BytesPerToken()
        self.template = TemplateTokens()

    def tab(
        self, caller: Caller, request: GenerateRequest, dialect: str, *, stream: bool = True
    ) -> Tab:
        """For `async with`, which raises RateLimited, QuotaExceeded or LimitsUnavailable where the
        request does not fit; such a refusal costs nothing. `stream`: the caller is shown what comes
        as it comes, not with the end alone."""
        return Tab(self, caller, request, dialect, stream)

    @property
    def ledger(self) -> str:
        """Its name among all of the world; usage that comes later is owed to it."""
        return self.pool.name

    async def charge_day(
        self, caller: Caller, request_id: str, requests: Sequence[GenerateRequest]
    ) -> Charge:
        """Take what each of `requests` may need from the day's quota: of work that waits for room
        and so knows no minutes. Raises QuotaExceeded or LimitsUnavailable."""
        limits = tuple(one for one in limits_of(caller.tenant) if one.kind is Kind.DAY)
        if not limits:
            return Charge(0, (0,) * len(requests))
        assumed = self._settings.assumed_answer_tokens
        day, tokens = limits[0].window(self.clock()), []
        for request in requests:
            prompt = self.text_tokens(request, prompt_bytes(request)) + self.added_tokens(request)
            tokens.append(prompt + answer_tokens(request, assumed, prompt, limits[0].amount))
        ask = Ask(request_id, caller.name, sum(tokens), limits, None, self.pool.shared, final=True)
        reply = await self.pool.reserve(ask)
        if not isinstance(reply.verdict, Fits):
            raise refusal(reply.verdict, reply.meters, self.clock())
        return Charge(day, tuple(tokens))

    def text_tokens(self, request: GenerateRequest, text_bytes: int) -> int:
        """Of its prompt, as far as answers have taught, without what the template adds."""
        return prompt_tokens(request, text_bytes, self.bytes.of(request.model))

    def added_tokens(self, request: GenerateRequest) -> int:
        """By the model's template, as far as answers have taught."""
        return self.template.of(request.model) if request.messages else 0

    def learn(
        self, request: GenerateRequest, text_bytes: int, text_tokens: int, prompt_tokens: int
    ) -> None:
        """`text_tokens` was the estimate, `prompt_tokens` is the truth."""
        if request.messages:
            self.template.learn(request.model, text_bytes, text_tokens, prompt_tokens)
            prompt_tokens = max(prompt_tokens - self.template.of(request.model), 1)
        self.bytes.learn(request.model, text_bytes, prompt_tokens)

    def ask_of(self, caller: Caller, request: GenerateRequest, prompt: int) -> Ask | None:
        """What has to be reserved; None for a tenant without limits."""
        limits = limits_of(caller.tenant)
        if not limits and caller.tenant.concurrent_streams is None:
            return None
        whole = min((one.amount for one in limits if one.kind is not Kind.REQUESTS), default=None)
        assumed = self._settings.assumed_answer_tokens
        return Ask(
            id=request.id,
            tenant=caller.name,
            tokens=prompt + answer_tokens(request, assumed, prompt, whole),
            limits=limits,
            max_streams=caller.tenant.concurrent_streams,
            leased=self.pool.shared,
        )


class Tab:
    """One request's. Entered before any work; `finish` before the last event goes out."""

    def __init__(
        self,
        budgets: Budgets,
        caller: Caller,
        request: GenerateRequest,
        dialect: str,
        stream: bool,
    ) -> None:
        self._stream = stream
        self._budgets = budgets
        self._caller = caller
        self._request = request
        self._dialect = dialect
        self._text_bytes = prompt_bytes(request)
        self._text_tokens = budgets.text_tokens(request, self._text_bytes)
        self._prompt = self._text_tokens + budgets.added_tokens(request)
        self._ask = budgets.ask_of(caller, request, self._prompt)
        self._answer = 0 if self._ask is None else self._ask.tokens - self._prompt
        self._reply: Reply | None = None
        self._region = "-"
        self._completion = 0
        self._begun = self._closed = False

    async def __aenter__(self) -> Tab:
        if self._ask is None:
            return self
        self._reply = await self._budgets.pool.reserve(self._ask)
        if not isinstance(self._reply.verdict, Fits):
            raise refusal(self._reply.verdict, self._reply.meters, self._budgets.clock())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._closed:
            return
        outcome = InternalError.code
        if isinstance(error, asyncio.CancelledError):
            outcome = Cancelled.code
        elif isinstance(error, RequestError):
            outcome = error.code
        left = outcome == Cancelled.code
        counts = left or (self._begun and self._stream)
        prompt = self._prompt if self._begun and counts else 0
        completion = self._completion if counts else 0
        usage = Usage(prompt_tokens=prompt, completion_tokens=completion)
        self._write(usage, outcome, complete=False)
        self._settle(self._prompt + completion if counts else 0, counts=counts)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What the tenant has left, as of the reservation; nothing without limits."""
        if self._ask is None or self._reply is None:
            return []
        now = self._budgets.clock()
        return list(limit_headers(self._ask.limits, self._reply.meters, now))

    def see(self, batch: Batch) -> None:
        """Take note of what is about to be delivered."""
        if not self._begun:
            self._begun = True
            self._region = batch.place.region
            if batch.place.prompt_tokens and batch.place.prompt_tokens != self._prompt:
                self._correct(batch.place.prompt_tokens)
        for event in batch.events:
            if isinstance(event, Delta):
                self._completion += len(event.token_ids)

    def anew(self) -> None:
        """The answer begins again, and nothing of it was shown."""
        self._begun, self._completion = False, 0

    def finish(self, done: Done) -> None:
        """Write the usage down and settle. Raises InternalError when it cannot be written: then
        the last event must not go out."""
        usage = done.usage
        self._write(usage, "ok", complete=True)
        self._budgets.learn(self._request, self._text_bytes, self._text_tokens, usage.prompt_tokens)
        self._settle(usage.prompt_tokens + usage.completion_tokens, counts=True)

    def _correct(self, prompt: int) -> None:
        if self._ask is not None:
            self._budgets.pool.adjust(self._ask.id, prompt + self._answer)
        self._prompt = prompt

    def _write(self, usage: Usage, outcome: str, *, complete: bool) -> None:
        record = UsageRecord(
            id=self._request.id,
            at=self._budgets.clock(),
            edge=self._budgets.edge,
            tenant=self._caller.name,
            key=self._caller.key_id,
            model=self._request.model,
            region=self._region,
            dialect=self._dialect,
            outcome=outcome,
            prompt=usage.prompt_tokens,
            cached=usage.cached_tokens,
            completion=usage.completion_tokens,
            complete=complete,
            worker=self._caller.worker,
        )
        try:
            self._budgets.usage.write(record)
        except OSError as error:
            _log.error("usage not written id=%s why=%s", self._request.id, error.strerror)
            if complete:
                raise InternalError("the usage of this answer could not be written down") from error

    def _settle(self, tokens: int, *, counts: bool) -> None:
        self._closed = True
        if self._ask is not None:
            self._budgets.pool.settle(self._ask.id, tokens, counts=counts)
