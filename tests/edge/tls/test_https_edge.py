"""An edge whose callers speak https: its process, real sockets, certificates made at run time."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import httpx
import pytest

from core.config import World, parse
from core.keys import append_new, new_key
from core.pins import certificates_in
from edge.tenants.opening import open_tenants
from tests.edge.fakes import END, SECRET, FakeRegion, Hold, chat, delta, world_of
from tests.edge.tls.conftest import https_edge, renew, start, topology

BODY = chat(stream=True)


def pem(certificate: bytes) -> str:
    return certificates_in(certificate)[0]


async def test_a_renewal_is_seen_by_new_callers_and_breaks_no_stream(tmp_path: Path) -> None:
    """With running streams and callers that come and go all the while."""
    gate = asyncio.Event()
    eu = FakeRegion("eu", script=lambda _: [delta("a"), Hold(gate), delta("z"), *END])
    old = renew(tmp_path)
    async with eu.serving(), https_edge(topology(tmp_path, eu.address), old) as edge:
        async with (
            edge.caller(old) as kept,
            edge.caller(old) as http,
            http.stream("POST", "/v1/chat/completions", json=BODY) as answer,
        ):
            assert (await kept.get("/healthz")).status_code == 200
            assert answer.http_version == "HTTP/1.1"
            pieces = answer.aiter_text()
            text = await anext(pieces)
            assert '"content":"a"' in text  # it is here before the rest is made
            broken = (tmp_path / "here.key").read_bytes()
            new = renew(tmp_path)
            good = (tmp_path / "here.key").read_bytes()
            (tmp_path / "here.key").write_bytes(broken)
            said = await edge.logged("do not belong together")
            assert pem(await edge.shown()) == pem(old)
            (tmp_path / "here.key").write_bytes(good)
            said = await edge.logged("https certificate taken up")
            assert said.count("not taken up") == 1
            assert pem(await edge.shown()) == pem(new)
            async with edge.caller(new) as later:
                page = await later.get("/metrics")
                assert "skerry_edge_certificate_left_seconds 7.7" in page.text
                assert (await later.get("/status")).json()["certificate_left_s"] > 7.7e6
            with pytest.raises(httpx.ConnectError, match="self-signed"):
                async with edge.caller(old) as late:
                    await late.get("/healthz")
            assert (await kept.get("/healthz")).status_code == 200
            gate.set()
            text += "".join([piece async for piece in pieces])
            assert '"content":"z"' in text
            assert text.endswith("data: [DONE]\n\n")
        left = certificates_in((tmp_path / "shown" / "here.crt").read_bytes())
        assert left == [pem(new), pem(old)]
        _, silent = await asyncio.open_connection("127.0.0.1", edge.port)
        edge.running.terminate()
        assert await asyncio.to_thread(edge.running.wait, 30) == 0
        silent.close()


async def test_whoever_does_not_speak_tls_gets_a_clean_end(tmp_path: Path) -> None:
    eu = FakeRegion("eu", script=lambda _: [delta("a"), *END])
    certificate = renew(tmp_path)
    async with (
        eu.serving(),
        https_edge(topology(tmp_path, eu.address, head_s=0.7), certificate) as edge,
    ):
        loop = asyncio.get_running_loop()
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            url = f"http://127.0.0.1:{edge.port}/v1/chat/completions"
            told = await http.post(url, content=b"x" * 200_000)
            assert told.status_code == 400
            assert "speaks https" in told.json()["error"]["message"]

        async def end_of(sent: bytes) -> tuple[bytes, float]:
            began = loop.time()
            reader, writer = await asyncio.open_connection("127.0.0.1", edge.port)
            writer.write(sent)
            try:
                said = await reader.read()
            except ConnectionError:
                said = b""
            writer.close()
            return said, loop.time() - began

        hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
        silent, slow, garbage = await asyncio.gather(
            end_of(b""), end_of(hello), end_of(b"\x00\xff\x00")
        )
        assert silent[0] == b""
        assert 0.5 < silent[1] < 30
        assert 0.5 < slow[1] < 30
        nonsense = [await end_of(b"\x16" + b"\0" * 400) for _ in range(5)]
        assert min(took_s for _, took_s in nonsense) < 0.6, "not when its time is over"
        assert garbage[0].startswith(b"HTTP/1.1 400 ")
        # After the handshake the limit on heads holds as ever.
        context = ssl.create_default_context(cadata=certificate.decode())
        reader, writer = await asyncio.open_connection("127.0.0.1", edge.port, ssl=context)
        writer.write(b"GET / HT")
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        writer.close()
        async with edge.caller(certificate) as http:
            assert (await http.get("/healthz")).status_code == 200


async def test_keys_are_followed_over_https(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another world by an authority that the system is told of, within one by the files."""
    eu = FakeRegion("eu", script=lambda _: [delta("a"), *END])
    certificate = renew(tmp_path)
    _, record = new_key("acme", now=1)
    append_new(tmp_path / "keys.jsonl", [record])

    async def known(world: World) -> bool:
        async with asyncio.TaskGroup() as tasks, open_tenants(world, "there", tasks=tasks):
            file = world.state / "keys.jsonl"
            return file.exists() and record.id in file.read_text()

    async with eu.serving(), https_edge(topology(tmp_path, eu.address), certificate) as edge:
        for folder in ("far", "farther", "near"):
            (tmp_path / folder).mkdir()
        access = f'anonymous = "never"\nkeys_from = "{edge.url}"'
        assert not await known(world_of(tmp_path / "far", eu, access=access))
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "here.crt"))
        assert await known(world_of(tmp_path / "farther", eu, access=access))
        monkeypatch.delenv("SSL_CERT_FILE")
        text = (tmp_path / "world.toml").read_text()
        text = text.replace('anonymous = "until-keys"', access.replace("https://", ""))
        text = text.replace('"127.0.0.1:0"', f'"127.0.0.1:{edge.port}"')
        (tmp_path / "near" / "region.secret").write_text(SECRET)
        (tmp_path / "near" / "here.crt").write_bytes(certificate)
        near = tmp_path / "near"
        assert await known(World(parse(text), near / "world.toml", near))


@pytest.mark.parametrize("workers", [1, 2])
def test_without_its_files_an_edge_does_not_start(tmp_path: Path, workers: int) -> None:
    file = topology(tmp_path, "127.0.0.1:9", workers=workers)
    assert start(file).wait(60) == 2
    said = (tmp_path / "log").read_text()
    assert f"{tmp_path / 'here.crt'} (edges.tls.certificate) cannot be read: No such file" in said
    assert "skerry certs public" in said
