"""A node's sessions with all routers of its region."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from core.tls import Credentials
from regional.node.ledger import Account, Ledger
from regional.node.session import RouterSession, SessionUser
from regional.pb import node_pb2 as pb


class RouterSessions:
    """One session a router, each as if it were alone; what goes on in one shows in the heartbeats
    of the others at once. See `RouterSession`."""

    def __init__(
        self,
        addresses: Sequence[str],
        user: SessionUser,
        *,
        pools: int,
        join: Callable[[], pb.NodeMessage],
        heartbeat: Callable[[], pb.NodeMessage],
        credentials: Credentials | None = None,
    ) -> None:
        ledger = Ledger(pools, self._changed)
        self._sessions = [
            RouterSession(
                address,
                user,
                join=join,
                heartbeat=heartbeat,
                ledger=ledger,
                credentials=credentials,
            )
            for address in addresses
        ]

    async def run(self) -> None:
        """Until cancelled or left."""
        async with asyncio.TaskGroup() as tasks:
            for session in self._sessions:
                tasks.create_task(session.run())

    def beat(self) -> None:
        """Send every router a heartbeat now."""
        for session in self._sessions:
            session.beat()

    async def leave(self, reason: str, *, timeout_s: float) -> None:
        """Say goodbye to all of them."""
        await asyncio.gather(
            *(session.leave(reason, timeout_s=timeout_s) for session in self._sessions)
        )

    def _changed(self, account: Account) -> None:
        for session in self._sessions:
            if session.account is not None and session.account is not account:
                session.beat()
