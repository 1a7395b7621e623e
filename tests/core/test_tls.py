"""Certificates of a world: real handshakes on loopback, rotation while a connection stands."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from core.config import Tls, World, parse
from core.errors import ConfigError
from core.tls import EVERY_S, Credentials, Files, credentials_of
from deploy import certs

TEXT = """
version = 1
[tls]
inside = true
[models.m]
source = "m.gguf"
[[edges]]
name = "ams"
[[regions]]
name = "eu"
[[regions.nodes]]
name = "eu-1"
role = "combined"
model = "m"
"""


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(parse(TEXT), tmp_path / "world.toml", tmp_path)
    certs.init(made, 30, lambda _: None)
    return made


def held(world: World, name: str) -> Credentials:
    found = credentials_of(world, name)
    assert found is not None
    return found


@asynccontextmanager
async def echo(server: Credentials) -> AsyncIterator[int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                writer.write(line)
        except (ssl.SSLError, ConnectionError):
            return  # a caller that was refused
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server.server)
    async with listening:
        yield listening.sockets[0].getsockname()[1]


async def said(port: int, context: ssl.SSLContext) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        writer.write(b"ahoy\n")
        return await reader.readline()
    finally:
        writer.close()


def test_processes_of_a_world_know_each_other(world: World) -> None:
    async def play() -> None:
        async with echo(held(world, "eu")) as port:
            assert await said(port, held(world, "ams").client) == b"ahoy\n"
            nobody = ssl.create_default_context(cafile=str(world.state / "certs" / "ca.crt"))
            try:
                answer = await said(port, nobody)
            except (ssl.SSLError, ConnectionError):
                answer = b""
            assert answer == b"", "a caller without a certificate was answered"

    asyncio.run(play())


def test_another_worlds_certificate_is_refused(world: World, tmp_path: Path) -> None:
    other = World(parse(TEXT), tmp_path / "w", tmp_path / "other")
    certs.init(other, 30, lambda _: None)

    async def play() -> None:
        async with echo(held(world, "eu")) as port:
            with pytest.raises(ssl.SSLCertVerificationError):
                await said(port, held(other, "ams").client)

    asyncio.run(play())


def test_an_address_that_the_certificate_does_not_name_is_refused(world: World) -> None:
    async def play() -> None:
        async with echo(held(world, "ams")) as port:  # an edge listens nowhere inside
            with pytest.raises(ssl.SSLCertVerificationError):
                await said(port, held(world, "eu-1").client)

    asyncio.run(play())


@pytest.mark.parametrize("authority", [False, True])
def test_a_rotation_breaks_nothing(world: World, authority: bool) -> None:
    server, client = held(world, "eu"), held(world, "ams")

    async def play() -> None:
        async with echo(server) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client.client)
            old = server.pem()
            if authority:
                certs.rotate(world, 30, lambda _: None, authority=True)
                assert await said(port, client.client) == b"ahoy\n"
                assert server.refresh()
                assert client.refresh()
            waits: list[float] = []
            certs.rotate(world, 30, lambda _: None, authority=False, sleep=waits.append)
            assert [wait > EVERY_S for wait in waits] == [True] * authority, "others read it first"
            assert server.pem() != old
            # One side has read the new ones, the other not yet: both orders.
            assert server.refresh()
            assert await said(port, client.client) == b"ahoy\n"
            assert client.refresh()
            assert not client.refresh(), "nothing is new any more"
            assert await said(port, client.client) == b"ahoy\n"
            writer.write(b"still\n")
            assert await reader.readline() == b"still\n"
            writer.close()

    asyncio.run(play())


def test_half_written_files_are_looked_at_again(world: World) -> None:
    ours = held(world, "eu")
    files = Files.of(world.state / "certs", "eu")
    good = files.certificate.read_bytes()
    files.certificate.write_bytes(good[: len(good) // 2])
    assert not ours.refresh()
    files.certificate.write_bytes(good)
    assert ours.refresh()


def test_a_pair_that_does_not_belong_together_breaks_no_new_connection(world: World) -> None:
    """As in the middle of a rotation, where key and certificate are written one after the other."""
    server, client = held(world, "eu"), held(world, "ams")
    files = Files.of(world.state / "certs", "eu")

    async def play() -> None:
        async with echo(server) as port:
            key = files.key.read_bytes()
            certs.rotate(world, 30, lambda _: None, authority=False)
            new = files.key.read_bytes()
            files.key.write_bytes(key)
            assert not server.refresh()
            assert await said(port, client.client) == b"ahoy\n"
            files.key.write_bytes(new)
            assert server.refresh()
            assert await said(port, client.client) == b"ahoy\n"

    asyncio.run(play())


def test_init_keeps_what_is_there_and_lists_it(world: World) -> None:
    before = (world.state / "certs" / "eu.crt").read_bytes()
    lines: list[str] = []
    certs.init(world, 30, lines.append)
    assert (world.state / "certs" / "eu.crt").read_bytes() == before
    assert lines == []
    rows = {row.name: row for row in certs.rows(world)}
    assert set(rows) == {"ca", "operator", "ams", "eu", "eu-1"}
    assert rows["eu"].days_left == 29
    assert "127.0.0.1" in rows["eu"].hosts
    key = world.state / "certs" / "eu.key"
    assert key.stat().st_mode & 0o077 == 0


def test_what_is_missing_says_how_it_is_made(tmp_path: Path) -> None:
    bare = World(parse(TEXT), tmp_path / "w", tmp_path)
    with pytest.raises(ConfigError, match="skerry certs init"):
        credentials_of(bare, "eu")
    with pytest.raises(ConfigError, match="skerry certs init"):
        certs.rotate(bare, 30, lambda _: None, authority=False)
    plain = World(parse(TEXT.replace("inside = true", "")), tmp_path / "w", tmp_path)
    assert plain.topology.tls == Tls()
    assert credentials_of(plain, "eu") is None


@pytest.mark.parametrize(("inside", "open_"), [("true", True), ("false", False)])
def test_off_loopback_needs_tls_or_trust(inside: str, open_: bool) -> None:
    text = TEXT.replace("inside = true", f"inside = {inside}").replace(
        'name = "eu"\n', 'name = "eu"\nhttp = "10.0.0.5:8701"\ngrpc = "10.0.0.5:8702"\n', 1
    )
    if open_:
        assert parse(text).regions[0].http == "10.0.0.5:8701"
    else:
        with pytest.raises(ConfigError, match=r"\[tls\] inside"):
            parse(text)
