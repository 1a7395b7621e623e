"""Brings the keys of another edge into our key file, for edges that share no folder.

`access.keys_from` names the edge. It is asked for its list each second, under the region's secret;
what is new is written down, so that keys are known after a restart too. The list holds digests, no
keys. While the edge is not reached the known keys go on, and the log says so.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import httpx

from core.errors import ConfigError
from core.headers import SECRET_HEADER
from core.keys import append_new, mark, parse_lines
from core.pins import Pins
from edge.tenants.keyring import LOOK_S

_log = logging.getLogger("skerry.keys")

ASK_S = 2.0
PATH = "/internal/v1/keys"
MADE = "x-skerry-keys-made"
"""Header of an answer: there were keys once, though the list may be empty."""


class Follower:
    """Writes what the edge at the URL `base` knows of keys into our key file."""

    def __init__(
        self,
        base: str,
        path: Path,
        client: httpx.AsyncClient,
        *,
        secret: bytes,
        pins: Pins | None = None,
    ) -> None:
        self._pins = pins
        self._url = f"{base}{PATH}"
        self._path = path
        self._client = client
        self._headers = {SECRET_HEADER: secret.decode()}
        self._etag = ""
        self._reached = True

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.ask()
            await asyncio.sleep(LOOK_S)

    async def ask(self) -> None:
        """Once; a failure is said in the log, when it begins and when it is over."""
        try:
            async with asyncio.timeout(ASK_S):
                await self._ask()
        except (httpx.HTTPError, OSError, ConfigError) as error:
            if self._reached:
                _log.error("keys not followed from=%s kind=%s", self._url, type(error).__name__)
            self._reached = False
        else:
            if not self._reached:
                _log.info("keys followed again from=%s", self._url)
            self._reached = True

    async def _ask(self) -> None:
        if self._pins is not None:
            self._pins.look()
        headers = self._headers | {"if-none-match": self._etag}
        answer = await self._client.get(self._url, headers=headers)
        if answer.status_code == 304:
            return
        answer.raise_for_status()
        records, _ = parse_lines(answer.content)
        await asyncio.to_thread(append_new, self._path, records)
        if MADE in answer.headers:
            await asyncio.to_thread(mark, self._path)
        self._etag = answer.headers.get("etag", "")
