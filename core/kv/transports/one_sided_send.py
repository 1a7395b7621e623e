"""The source's end where the receiver reads: say what is where, until the receiver has it all."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from time import perf_counter

import msgspec
from xxhash import xxh3_64

from core.errors import RequestError, TransferFailed
from core.framing import FrameDecoder, encode_frame
from core.kv.ticket import Ticket
from core.kv.transports.base import Piece
from core.kv.transports.one_sided_wire import (
    End,
    Read,
    Ready,
    ReceiverSaid,
    Refused,
    Renew,
    Shown,
    Source,
    Taken,
    Welcome,
    encode_hello,
    shown,
)
from core.kv.transports.words import Word, Words

CONNECT_TIMEOUT_S = 5.0
TURN_S = 0.0005
"""After so long the event loop gets a turn."""
_FRAME_BYTES = 4 << 20
"""The receiver begins to copy while we still look at the next so many bytes."""
_READ_BYTES = 4 << 10


async def present(
    sock: socket.socket,
    ticket: Ticket,
    model: bytes,
    source: Source,
    descriptors: Sequence[int],
    failed: Callable[[TransferFailed], None],
    words: Words,
    *,
    checked: bool,
) -> OneSidedShipment:
    """Present a ticket on a connected socket, which is the shipment's afterwards. `checked`: tell
    the xxh3-64 of each piece. Raises TransferFailed."""
    hello = encode_hello(ticket, model, source)
    loop = asyncio.get_running_loop()
    decoder = FrameDecoder[ReceiverSaid](ReceiverSaid)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            if descriptors:
                sent = socket.send_fds(sock, [hello], descriptors)
                await loop.sock_sendall(sock, hello[sent:])
            else:
                await loop.sock_sendall(sock, hello)
            said: list[ReceiverSaid] = []
            while not said:
                said = decoder.feed(await _more(loop, sock))
        if not isinstance(said[0], Welcome):
            raise _refusal(said[0])
    except (OSError, TimeoutError) as error:
        raise TransferFailed(f"the receiver cannot be reached: {error}") from error
    return OneSidedShipment(
        sock, decoder, source.word, words, checked=checked, stall_s=ticket.lease_s, failed=failed
    )


class OneSidedShipment:
    """See `base.Shipment`. `stall_s`: the receiver is lost when it says nothing for so long while
    we wait for it."""

    def __init__(
        self,
        sock: socket.socket,
        decoder: FrameDecoder[ReceiverSaid],
        word: Word,
        words: Words,
        *,
        checked: bool,
        stall_s: float,
        failed: Callable[[TransferFailed], None],
    ) -> None:
        self._sock = sock
        self._decoder = decoder
        self._word = word
        self._words = words
        self._checked = checked
        self._stall_s = stall_s
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._error: TransferFailed | None = None
        self._finishing = False
        self._heard = asyncio.Event()
        self._untaken = 0
        """Pieces that were told and are not verified yet."""
        self._reader = asyncio.create_task(self._listen(), name="kv-receiver")

    async def send(self, pieces: Sequence[Piece]) -> None:
        told: list[Shown] = []
        size = 0
        turn = perf_counter()
        for piece in pieces:
            told.append(shown(piece, digest_of(piece) if self._checked else None))
            size += piece.size
            if size >= _FRAME_BYTES:
                await self._tell(told)
                told, size = [], 0
            if perf_counter() - turn > TURN_S:
                await asyncio.sleep(0)
                turn = perf_counter()
        if told:
            await self._tell(told)
        await self._until(lambda: not self._untaken)

    async def renew(self) -> None:
        await self._say(Renew())

    async def finish(self, computed_tokens: int) -> None:
        self._finishing = True
        await self._say(End(computed_tokens))
        await self._until(self._reader.done)

    async def close(self) -> None:
        self._words.revoke(self._word)
        self._reader.cancel()
        try:
            await asyncio.wait([self._reader])  # the loop lets go of the socket before it closes
        finally:
            self._sock.close()

    async def _tell(self, pieces: Sequence[Shown]) -> None:
        self._untaken += len(pieces)
        await self._say(Read(tuple(pieces)))

    async def _until(self, done: Callable[[], bool]) -> None:
        """Raises TransferFailed when the receiver has refused, or says nothing for too long."""
        while not done() and self._error is None:
            self._heard.clear()
            try:
                async with asyncio.timeout(self._stall_s):
                    await self._heard.wait()
            except TimeoutError as error:
                raise TransferFailed(
                    f"the receiver has said nothing for {self._stall_s:g} s"
                ) from error
        if self._error is not None:
            raise self._error

    async def _say(self, message: msgspec.Struct) -> None:
        if self._error is not None:
            raise self._error
        try:
            async with asyncio.timeout(self._stall_s):
                await self._loop.sock_sendall(self._sock, encode_frame(message))
        except TimeoutError as error:
            raise TransferFailed(
                f"the receiver has taken nothing for {self._stall_s:g} s"
            ) from error
        except OSError as error:
            await asyncio.wait([self._reader], timeout=1.0)  # its own words, if they came first
            raise self._error or _broken(error) from error

    async def _listen(self) -> None:
        """Hear until the receiver is ready; anything else is the end of the transfer."""
        try:
            while not self._hear(self._decoder.feed(await _more(self._loop, self._sock))):
                self._heard.set()
        except TransferFailed as error:
            self._error = error
        except OSError as error:
            self._error = _broken(error)
        except RequestError as error:
            self._error = TransferFailed(f"the receiver's words are none of ours: {error}")
        finally:
            self._heard.set()
        if self._error is not None and not self._finishing:
            self._failed(self._error)

    def _hear(self, messages: Sequence[ReceiverSaid]) -> bool:
        """Whether the receiver is ready. Raises TransferFailed when it has refused."""
        for message in messages:
            if isinstance(message, Taken):
                self._untaken -= message.pieces
            if isinstance(message, Ready) and self._finishing:
                return True
            if isinstance(message, Refused | Ready | Welcome):
                raise _refusal(message)
        return False


def digest_of(piece: Piece) -> int:
    check = xxh3_64()
    for part in piece.parts:
        check.update(part)
    return check.intdigest()


async def _more(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> bytes:
    data = await loop.sock_recv(sock, _READ_BYTES)
    if not data:
        raise TransferFailed("the receiver closed the connection")
    return data


def _refusal(message: ReceiverSaid) -> TransferFailed:
    if isinstance(message, Refused):
        return TransferFailed(f"the receiver refused: {message.reason}")
    return TransferFailed("the receiver spoke out of turn")


def _broken(error: OSError) -> TransferFailed:
    return TransferFailed(f"the connection to the receiver broke: {error}")
