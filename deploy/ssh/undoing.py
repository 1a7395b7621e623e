"""What a deploy orders of a region's routers, undone by the next deploy where it was cut off on the
way: the machine that it ran on may have gone to sleep, and what it drained would rest for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec

from core.errors import ConfigError
from core.orders import OrderAsk
from deploy.rollout.undoing import Home
from deploy.ssh.channel import Host, HostFailed

Give = Callable[[str, OrderAsk], None]
"""An order for a router. Raises ConfigError."""


@contextmanager
def kept_on(host: Host, path: str, home: Home) -> Iterator[None]:
    """While a deploy is under way, and after it where it is cut off. Raises HostFailed."""
    if not home:
        yield
        return
    host.write(path, msgspec.json.encode(home))
    try:
        yield
    except ConfigError:  # all has been taken back, or it is said what has not
        with suppress(HostFailed):
            host.remove(path)
        raise
    host.remove(path)


def undo(host: Host, path: str, give: Give, say: Callable[[str], None]) -> None:
    """Before anything is asked about the region. Who takes no order is named. Raises HostFailed."""
    kept = host.read(path)
    if kept is None:
        return
    try:
        home = msgspec.json.decode(kept, type=dict[str, OrderAsk])
    except msgspec.MsgspecError as error:
        say(
            f"note: {host.name}: {path} is not read ({error}): an earlier deploy was cut off, and "
            "what it drained may rest still; `skerry undrain NAME` takes that back"
        )
        home = {}
    for router, ask in sorted(home.items()):
        try:
            give(router, ask)
        except ConfigError as error:
            say(
                f"note: an earlier deploy was cut off, and what it had ordered of router {router} "
                f"may hold still: {error}"
            )
        else:
            say(f"an earlier deploy was cut off: what it had ordered of router {router} is undone")
    host.remove(path)
