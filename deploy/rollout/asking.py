"""What the processes of a running world say of themselves, as a rollout asks."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import msgspec

from core.batches import QUEUE_PATH, QueueLeft
from core.config import Topology, World
from core.errors import ConfigError
from core.headers import SECRET_HEADER
from core.orders import ORDERS_PATH, TOPOLOGY_PATH, Orders, TopologyAsk
from core.status import NodeStatus
from deploy.fleet import WorldEnds
from deploy.inside import door_urls
from deploy.orders import reason_of
from deploy.ready import router_view
from deploy.rollout.steps import Kind
from deploy.status import EdgeView, RegionView

TIMEOUT_S = 2.0
"""Of a question that is asked again and again."""
LOOK_S = 10.0
"""Of one that is asked once and decided by: who is only slow is there."""
SETTLE_S = 3.0
"""An edge that was kept from reading misses its regions for a moment."""
TELL_S = 60.0
"""A router reads the tokenizers of new models before it answers."""
POLL_S = 0.1
ANEW = {"connection": "close"}
"""A kept connection would lead to the same process each time, and hold up one that retires."""


class Asking:
    """`topology` names who is to be asked, with the addresses of the running world."""

    def __init__(
        self,
        client: httpx.Client,
        world: World,
        pause: Callable[[float], bool],
        *,
        ran: Sequence[Topology] = (),
    ) -> None:
        """`pause` waits so many seconds; True when the world ends meanwhile. `ran`: what processes
        run from, which may be older than `world`: each unit is given another one in its turn."""
        self._client = client
        self._secret = world.secret("region").decode()
        self._pause = pause
        self.topology: Topology = world.topology
        self._before = (world.topology, *ran)

    def until(self, what: Callable[[], bool], within_s: float, *, else_: Callable[[], str]) -> None:
        """Raises ConfigError with the words of `else_` when it has not come true, WorldEnds."""
        end = time.monotonic() + within_s
        while not what():
            if time.monotonic() > end:
                raise ConfigError(f"{else_()} after {within_s:g} s")
            if self._pause(POLL_S):
                raise WorldEnds

    # ------------------------------------------------------------------ edges

    def edge_at(self, base: str, timeout_s: float = TIMEOUT_S) -> EdgeView | None:
        try:
            answer = self._client.get(f"{base}/status", headers=ANEW, timeout=timeout_s)
            return msgspec.json.decode(answer.content, type=EdgeView)
        except (httpx.HTTPError, msgspec.MsgspecError):
            return None

    def hears(self, base: str, region: str | None = None) -> bool:
        """Whether the edge there hears `region`, or any."""
        view = self.edge_at(base)
        return view is not None and _hears(view, region)

    def crew_hears(self, base: str, pids: set[int], workers: int) -> bool:
        """Whether all of an edge's `workers` are up and are of `pids`, and the one that is asked
        hears a region. With another crew at the same port it is chance who is asked."""
        view = self.edge_at(base)
        if view is None or not {one.pid for one in view.workers} <= pids:
            return False
        return len(view.workers) == workers and _hears(view, None)

    def all_hear(self, region: str) -> bool:
        return all(self.hears(edge.url, region) for edge in self.topology.edges)

    def serving(self) -> frozenset[str]:
        """The regions that every edge can use now; those that rest are not."""
        end = time.monotonic() + SETTLE_S
        while True:
            found, missed = self._serving()
            if not missed or time.monotonic() > end or self._pause(POLL_S):
                return found

    def _serving(self) -> tuple[frozenset[str], bool]:
        """And whether an edge misses one that it may hear again in a moment."""
        found: set[str] | None = None
        missed = False
        for edge in self.topology.edges:
            view = self.edge_at(edge.url, LOOK_S)
            regions = view.regions if view else ()
            missed |= any(one.state != "fresh" for one in regions)
            usable = {one.name for one in regions if _heard(one) and not _rests(one)}
            found = usable if found is None else found & usable
        return frozenset(found or ()), missed

    def metrics(self) -> list[bytes]:
        """Of every edge that answers."""
        pages: list[bytes] = []
        for edge in self.topology.edges:
            try:
                answer = self._client.get(f"{edge.url}/metrics", headers=ANEW, timeout=TIMEOUT_S)
            except httpx.HTTPError:
                continue
            if answer.is_success:
                pages.append(answer.content)
        return pages

    # ------------------------------------------------------------------ regions

    def doors(self, kind: Kind, name: str, but: Collection[str] = ()) -> Mapping[str, str]:
        """URLs of the routers that know of it, by name; also of a node that is to go. Those of
        `but` are left out where they do not answer."""
        found = self._doors(kind, name)
        return {door: url for door, url in found.items() if door not in but or self.answers(url)}

    def _doors(self, kind: Kind, name: str) -> Mapping[str, str]:
        for region in (one for known in (self.topology, *self._before) for one in known.regions):
            urls = door_urls(self.topology, [region])
            if kind is Kind.ROUTER and name in urls:
                return {name: urls[name]}
            if kind is Kind.REGION and name == region.name:
                return urls
            if kind is Kind.NODE and any(node.name == name for node in region.nodes):
                return urls
        raise ConfigError(f"no {kind} is named {name!r}")

    def answers(self, router: str, timeout_s: float = TIMEOUT_S) -> bool:
        try:
            return self._client.get(f"{router}/healthz", timeout=timeout_s).is_success
        except httpx.HTTPError:
            return False

    def mute(self, region: str) -> list[str]:
        """Its routers that do not answer."""
        doors = self.doors(Kind.REGION, region).items()
        return [name for name, url in doors if not self.answers(url, LOOK_S)]

    def queue_left(self, region: str, but: Collection[str] = ()) -> QueueLeft:
        """Of all its routers; nothing of one of an earlier release. `but`: see `doors`. Raises
        ConfigError when one does not answer."""
        doors = self.doors(Kind.REGION, region, but)
        found = [self._queue_left(name, url) for name, url in doors.items()]
        return QueueLeft(
            waiting=sum(one.waiting for one in found),
            owed=sum(one.owed for one in found),
            kept=sum(one.kept for one in found),
        )

    def _queue_left(self, router: str, url: str) -> QueueLeft:
        try:
            said = self._client.get(
                f"{url}{QUEUE_PATH}", headers={SECRET_HEADER: self._secret}, timeout=TIMEOUT_S
            )
            if said.status_code in (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED):
                return QueueLeft()
            return msgspec.json.decode(said.raise_for_status().content, type=QueueLeft)
        except (httpx.HTTPError, msgspec.MsgspecError) as error:
            raise ConfigError(f"router {router} does not say what is queued: {error}") from error

    def tell(self, router: str, topology: Path, *, mute: bool = False) -> None:
        """Have it go on with the topology in this file; one that was `mute` only where it answers
        now. Raises ConfigError with its reason."""
        (url,) = self.doors(Kind.ROUTER, router).values()
        if mute and not self.answers(url):
            return
        try:
            said = self._client.post(
                f"{url}{TOPOLOGY_PATH}",
                content=msgspec.json.encode(TopologyAsk(str(topology))),
                headers={SECRET_HEADER: self._secret},
                timeout=TELL_S,
            )
        except httpx.HTTPError as error:
            raise ConfigError(f"router {router} does not answer at {url}: {error}") from error
        if not said.is_success:
            raise ConfigError(f"router {router} refused the change: {reason_of(said)}")

    def node(self, router: str, name: str) -> NodeStatus | None:
        view = router_view(self._client, router)
        return next((one for one in view.nodes if one.name == name), None) if view else None

    def under_way(self, kind: Kind, name: str, but: Collection[str] = ()) -> int:
        """Requests that it has. `but`: see `doors`. Raises ConfigError when a router does not
        answer."""
        return sum(self._under_way(kind, name, but))

    def _under_way(self, kind: Kind, name: str, but: Collection[str]) -> Iterator[int]:
        for door, url in self.doors(kind, name, but).items():
            view = router_view(self._client, url)
            if view is None:
                raise ConfigError(f"router {door} does not answer at {url}")
            if kind is not Kind.NODE:
                yield view.active
                continue
            for node in view.nodes:
                if node.name == name:
                    yield node.running + node.waiting + (node.prefill_backlog_tokens > 0)

    def orders(self, region: str, mute: Collection[str] = ()) -> Orders:
        """What holds for a region by its operator, as the first of its routers has it that answers,
        those of `mute` not asked; nothing where none does."""
        for name, url in self.doors(Kind.REGION, region).items():
            if name in mute:
                continue
            try:
                said = self._client.get(
                    f"{url}{ORDERS_PATH}", headers={SECRET_HEADER: self._secret}, timeout=LOOK_S
                )
                return msgspec.json.decode(said.content, type=Orders)
            except (httpx.HTTPError, msgspec.MsgspecError):
                continue
        return Orders()


def _hears(view: EdgeView, region: str | None) -> bool:
    return any(map(_heard, (one for one in view.regions if region in (None, one.name))))


def _heard(region: RegionView) -> bool:
    status = region.status
    return region.state == "fresh" and status is not None and bool(status.models)


def _rests(region: RegionView) -> bool:
    return region.status is not None and region.status.draining
