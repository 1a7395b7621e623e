"""An edge's own process behind https, in front of a fake region."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from deploy.certs import self_signed
from tests.edge.fakes import SECRET

HOSTS = ("api.example.org", "localhost", "127.0.0.1")
WORLD = """
version = 1
[access]
anonymous = "until-keys"
[limits]
head_s = {head_s}
[models.tiny]
source = "tiny.gguf"
[[edges]]
name = "here"
listen = "127.0.0.1:0"
workers = {workers}
tls = {{ certificate = "here.crt", key = "here.key" }}
[[regions]]
name = "eu"
http = "{region}"
[[regions.nodes]]
name = "eu-1"
role = "combined"
model = "tiny"
"""


def renew(folder: Path, days: int = 90) -> bytes:
    """A new pair in the place of the one that is there. Returns the certificate."""
    certificate, key = self_signed(HOSTS, days)
    (folder / "here.key").write_bytes(key)
    (folder / "here.crt").write_bytes(certificate)
    return certificate


def trusting(certificate: bytes) -> ssl.SSLContext:
    """As a caller would who was given this certificate: with names, times and all."""
    return ssl.create_default_context(cadata=certificate.decode())


@dataclass(frozen=True, slots=True)
class Process:
    folder: Path
    port: int
    running: subprocess.Popen[str]
    log: Path

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def caller(self, certificate: bytes) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.url, verify=trusting(certificate), trust_env=False, timeout=60
        )

    async def shown(self) -> bytes:
        """The certificate that a new connection is shown, in PEM."""
        pem = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", self.port))
        return pem.encode()

    async def logged(self, what: str) -> str:
        """The log, once `what` stands in it."""
        async with asyncio.timeout(30):
            while what not in (text := self.log.read_text()):
                await asyncio.sleep(0.05)
        return text


def topology(folder: Path, region: str, *, workers: int = 1, head_s: float = 20.0) -> Path:
    file = folder / "world.toml"
    file.write_text(WORLD.format(region=region, workers=workers, head_s=head_s), encoding="utf-8")
    (folder / "region.secret").write_text(SECRET)
    return file


def start(file: Path, *more: str, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[str]:
    folder = file.parent
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "edge", "--topology", str(file), "--state", str(folder)),
                *("--name", "here", *more),
            ],
            stderr=log,
            text=True,
            pass_fds=pass_fds,
        )


@asynccontextmanager
async def https_edge(file: Path, certificate: bytes) -> AsyncIterator[Process]:
    """Up, and hearing its region."""
    folder = file.parent
    running = start(file)
    try:
        log = folder / "log"
        async with asyncio.timeout(30):
            while "edge ready address=https://" not in (text := log.read_text()):
                assert running.poll() is None, text
                await asyncio.sleep(0.05)
        port = int(text.split("address=https://127.0.0.1:")[1].split()[0])
        process = Process(folder, port, running, log)
        async with process.caller(certificate) as http, asyncio.timeout(30):
            while (await http.get("/status")).json()["regions"][0]["state"] != "fresh":
                await asyncio.sleep(0.02)
        yield process
    finally:
        running.kill()
        running.wait()
