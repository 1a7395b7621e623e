"""How an edge hands requests to a region's queue and asks for them: the seam, its aiohttp form,
and which regions to ask (`idlest`, pure).

A batch goes to the region with the least work, since nobody waits for it. It is there or it is
not: an id that was handed in twice is one batch, so a lost answer may be asked for again.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

import aiohttp
import msgspec

from core.batches import BatchState, Owed, OwedPage, QueueReply, Submission, Written
from core.errors import IncompleteStream, RegionUnavailable, VersionSkew, from_fault
from core.events import Fault
from core.headers import SECRET_HEADER, WIRE_HEADER
from core.types import WIRE_VERSION, ModelName, RegionName
from edge.routing.view import RegionView

SUBMIT_S, ASK_S = 30.0, 10.0
RETRY_S = 2.0
"""After a region was not reached: as long as one takes that was started again."""
_WIRE = str(WIRE_VERSION)
_Reply = TypeVar("_Reply", BatchState, OwedPage, Written)
_decode = msgspec.msgpack.Decoder(QueueReply).decode


class QueueClient(Protocol):
    """One region's queue. Every method raises errors of `core.errors` only."""

    async def submit(self, batch: Submission) -> BatchState:
        """Raises NoCapacity when the queue is full, RegionUnavailable when the region was not
        reached: then another one may have the batch."""
        ...

    async def state(self, batch: str, namespace: str) -> BatchState:
        """Raises NotFound."""
        ...

    async def owed(self, collector: str) -> Sequence[Owed]:
        """Usage that the ledger of this name is to write down; more may come afterwards."""
        ...

    async def written(self, collector: str, request_ids: Sequence[str]) -> frozenset[str]:
        """They are in that ledger. Those that were owed until now; asked again, none."""
        ...


def idlest(
    regions: Iterable[RegionView], model: ModelName, allowed: frozenset[RegionName] | None
) -> list[RegionName]:
    """The regions that may take a batch, the one with the least work first, those that we have not
    heard of lately last."""
    able = [
        region
        for region in regions
        if not region.draining
        and region.serves(model)
        and (allowed is None or region.name in allowed)
    ]
    able.sort(key=lambda region: (not region.usable, region.work_s, region.round_trip_s))
    return [region.name for region in able]


class HttpQueueClient:
    """A region's queue behind HTTP. `session` is shared and closed by the owner. `delay_s`: the
    simulated round trip of a world on one machine."""

    def __init__(
        self,
        name: RegionName,
        address: str,
        session: aiohttp.ClientSession,
        *,
        secret: bytes,
        scheme: str = "http",
        delay_s: float = 0.0,
    ) -> None:
        self._name = name
        self._base = f"{scheme}://{address}/internal/v1/"
        self._session = session
        self._headers = {SECRET_HEADER: secret.decode(), WIRE_HEADER: _WIRE}
        self._delay_s = delay_s

    async def submit(self, batch: Submission) -> BatchState:
        body = msgspec.msgpack.encode(batch)
        return _one(BatchState, await self._ask("POST", "queue", SUBMIT_S, {}, body))

    async def state(self, batch: str, namespace: str) -> BatchState:
        named = {"namespace": namespace}
        return _one(BatchState, await self._ask("GET", f"queue/{batch}", ASK_S, named))

    async def owed(self, collector: str) -> Sequence[Owed]:
        named = {"collector": collector}
        return _one(OwedPage, await self._ask("GET", "owed", ASK_S, named)).items

    async def written(self, collector: str, request_ids: Sequence[str]) -> frozenset[str]:
        body = msgspec.msgpack.encode(Written(request_ids=tuple(request_ids)))
        named = {"collector": collector}
        return frozenset(
            _one(Written, await self._ask("POST", "owed", ASK_S, named, body)).request_ids
        )

    async def _ask(
        self,
        method: str,
        path: str,
        within_s: float,
        named: dict[str, str],
        body: bytes | None = None,
    ) -> bytes:
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        try:
            async with (
                asyncio.timeout(within_s),
                self._session.request(
                    method,
                    self._base + path,
                    data=io.BytesIO(body) if body is not None else None,
                    params=named,
                    headers=self._headers,
                ) as answer,
            ):
                data = await answer.read()
        except aiohttp.ClientConnectorError as error:
            raise RegionUnavailable(
                f"region {self._name} is not reached: {error}", retry_after_s=RETRY_S
            ) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise IncompleteStream(f"the answer from region {self._name} was cut") from error
        if answer.status != 200:
            raise RegionUnavailable(f"region {self._name} answered {answer.status}")
        return data


def _one(kind: type[_Reply], data: bytes) -> _Reply:
    try:
        reply = _decode(data)
    except msgspec.MsgspecError as error:
        raise VersionSkew(f"the region's word on its queue is not understood: {error}") from error
    if isinstance(reply, Fault):
        raise from_fault(reply)
    if not isinstance(reply, kind):
        raise VersionSkew("the region's word on its queue answers something else")
    return reply
