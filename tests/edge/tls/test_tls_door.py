"""The door alone: what its process is short of, and its end."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from contextlib import suppress
from pathlib import Path
from typing import cast

import pytest

from core.accepting import PAUSE_S
from deploy.certs import self_signed
from edge.tls_door import TlsDoor
from tests.edge.tls.conftest import trusting
from tests.listeners import Failing


class Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[bytes, ssl.SSLContext]:
    certificate, key = self_signed(["127.0.0.1"], 3)
    (tmp_path / "both.pem").write_bytes(certificate + key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "both.pem")
    return certificate, context


async def test_without_room_it_rests_and_goes_on(
    pair: tuple[bytes, ssl.SSLContext], caplog: pytest.LogCaptureFixture
) -> None:
    certificate, context = pair
    listener = Failing.on_loopback(errno.EMFILE, times=1)
    port = listener.getsockname()[1]
    door = TlsDoor(listener, Echo, context=lambda: context, handshake_s=60)
    loop = asyncio.get_running_loop()
    began = loop.time()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(certificate))
    assert loop.time() - began >= PAUSE_S * 0.9
    assert "no room for another connection" in caplog.text
    writer.write(b"ahoy\n")
    assert await reader.readline() == b"ahoy\n"
    door.close()
    door.close()
    writer.write(b"still\n")  # who is in stays
    assert await reader.readline() == b"still\n"
    writer.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_closed_while_it_rests_it_stays_closed(pair: tuple[bytes, ssl.SSLContext]) -> None:
    _, context = pair
    listener = Failing.on_loopback(errno.EMFILE, times=2)
    number = listener.fileno()
    door = TlsDoor(listener, Echo, context=lambda: context, handshake_s=60)
    door.take_in()  # no room: it rests
    door.take_in()  # the same once more
    door.close()
    with socket.create_server(("127.0.0.1", 0)) as next_one:
        assert next_one.fileno() == number, "descriptors are used again"
        await asyncio.sleep(PAUSE_S * 1.2)
        assert not asyncio.get_running_loop().remove_reader(number), "nobody listens for us there"


async def test_who_waits_in_the_queue_is_taken_in_before_it_closes(
    pair: tuple[bytes, ssl.SSLContext],
) -> None:
    certificate, context = pair
    listener = socket.create_server(("127.0.0.1", 0))
    with socket.create_connection(listener.getsockname()) as waiting:
        door = TlsDoor(listener, Echo, context=lambda: context, handshake_s=60)
        assert door.shaking == 0
        door.take_in()
        door.close()
        assert door.shaking == 1
        loop = asyncio.get_running_loop()

        def speak() -> bytes:
            with trusting(certificate).wrap_socket(waiting, server_hostname="127.0.0.1") as tls:
                tls.sendall(b"late")
                return tls.recv(10)

        assert await loop.run_in_executor(None, speak) == b"late"
        assert door.shaking == 0


async def test_one_who_has_gone_does_not_keep_the_others_out(
    pair: tuple[bytes, ssl.SSLContext],
) -> None:
    _, context = pair
    listener = Failing.on_loopback(errno.ECONNABORTED, times=1)
    with socket.create_connection(listener.getsockname()):
        door = TlsDoor(listener, Echo, context=lambda: context, handshake_s=60)
        door.take_in()
        assert door.shaking == 1
        await asyncio.sleep(0)
        await door.hang_up()


async def test_its_end_breaks_off_who_has_not_begun(pair: tuple[bytes, ssl.SSLContext]) -> None:
    _, context = pair
    listener = socket.create_server(("127.0.0.1", 0))
    with (
        socket.create_connection(listener.getsockname()) as silent,
        socket.create_connection(listener.getsockname()) as slow,
    ):
        slow.sendall(b"\x16\x03\x01\x02\x00\x01")
        door = TlsDoor(listener, Echo, context=lambda: context, handshake_s=60)
        door.take_in()
        await asyncio.sleep(0)
        assert door.shaking == 2
        await door.hang_up()
        assert door.shaking == 0
        for one in (silent, slow):
            one.setblocking(False)
            with suppress(ConnectionResetError):
                assert await asyncio.get_running_loop().sock_recv(one, 10) == b""
