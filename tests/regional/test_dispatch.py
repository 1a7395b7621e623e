"""The queue's corners that sockets cannot be timed to hit: sessions are objects here."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from core.config import parse
from core.errors import NoCapacity
from core.events import Event, Fault, event_decoder
from core.metrics import RouterMetrics
from core.types import ModelName, NodeName
from regional.cluster import Cluster
from regional.dispatch import LOOK_AHEAD, Dispatcher, Placed
from regional.kv_index import KvIndex
from regional.pb import node_pb2 as pb
from regional.placement import Ask, Reason
from regional.reading import Reader, Reading
from regional.router import Router
from regional.rpc import NodeSession
from tests.regional.fake_node import MODEL, attempt_of
from tests.regional.fakes import ByteText, ask, no_prefixes, run, topology

OTHER = ModelName("other")
TOPOLOGY = parse(
    topology([("p1", "prefill"), ("d1", "decode"), ("d2", "decode")], queue=3)
    + f"""
[[regions.nodes]]
name = "o1"
role = "decode"
model = "{OTHER}"
[models.{OTHER}]
source = "package:none"
"""
)
REGION = TOPOLOGY.region("here")


def session(
    name: str, role: str, serial: int, *, slots: int = 8, model: ModelName = MODEL
) -> NodeSession:
    offer = pb.ModelOffer(name=model, fingerprint=b"same", context=4096, blocks=1024)
    join = pb.Join(name=name, role=role, max_sequences=slots, max_step_tokens=512, models=[offer])
    return NodeSession(join, serial)


class Desk:
    """A dispatcher over two nodes."""

    def __init__(self, *, slots: int = 8, limit: int = 3) -> None:
        self.cluster = Cluster(REGION, heartbeat_s=1.0)
        self.cluster.join(session("p1", "prefill", 1))
        self.cluster.join(session("d1", "decode", 2, slots=slots))
        self.dispatcher = Dispatcher(
            self.cluster, KvIndex(), limit=limit, split_min_tokens=64, changed=lambda: None
        )
        self._ages = 0

    async def want(
        self,
        tokens: int,
        *,
        again: bool = False,
        model: ModelName = MODEL,
        choices: int = 1,
        wait: bool = True,
        priority: int = 0,
    ) -> asyncio.Task[Placed]:
        """A request that has reached the queue when this returns."""
        self._ages += 1
        reading = Reading(ask(), list(range(tokens)))
        wanted = Ask(model=model, prompt_tokens=tokens, max_tokens=4, choices=choices)
        task = asyncio.create_task(
            self.dispatcher.place(
                wanted, reading, age=self._ages, priority=priority, again=again, wait=wait
            )
        )
        await asyncio.sleep(0)
        return task

    def counted(self) -> list[tuple[NodeName, int, int]]:
        view = self.cluster.view()
        return [(n.name, n.prefills, n.sequences) for n in view.nodes if n.prefills or n.sequences]


def test_every_choice_is_a_sequence_of_its_node() -> None:
    async def test() -> None:
        desk = Desk(slots=4)
        several = await (await desk.want(10, choices=4))
        assert desk.counted() == [("d1", 1, 4)]
        waiting = await desk.want(10)
        assert not waiting.done(), "all slots are taken"
        several.release()
        assert desk.counted() == []
        desk.dispatcher.poke()
        (await waiting).release()
        assert desk.counted() == []

    run(test())


def test_who_may_not_wait_is_refused_at_once_or_placed() -> None:
    async def test() -> None:
        desk = Desk(slots=1)
        placed = await (await desk.want(10, wait=False))
        with pytest.raises(NoCapacity) as refused:
            await (await desk.want(10, wait=False))
        assert refused.value.retry_after_s
        assert desk.dispatcher.queued == 0
        patient = await desk.want(10)
        queued = await desk.want(10, priority=100)
        assert not patient.done()
        assert [desk.dispatcher.waiting(n) for n in (0, 1, 100, 101)] == [0, 1, 1, 2]
        placed.release()
        desk.dispatcher.poke()
        (await patient).release()
        desk.dispatcher.poke()
        (await queued).release()

    run(test())


def test_a_long_prompt_is_not_overtaken_by_those_that_would_fit() -> None:
    async def test() -> None:
        desk = Desk()
        first = await (await desk.want(600))
        long = await desk.want(2000)
        would_fit = await desk.want(400)  # 600 + 400 tokens are within two chunks
        short = await desk.want(10)
        assert first.prefill is not None
        assert (await short).prefill is None
        assert not long.done()
        assert not would_fit.done()
        first.prefill.charge.prompt_read()
        desk.dispatcher.poke()
        assert (await long).placement.compute_tokens == 1999
        # behind 2,000 tokens it would wait longer than it disturbs where it decodes
        assert (await would_fit).placement.reason is Reason.PREFILL_BUSY
        assert desk.dispatcher.queued == 0

    run(test())


def test_a_model_that_is_overrun_holds_up_no_other() -> None:
    async def test() -> None:
        desk = Desk(slots=1, limit=3 * LOOK_AHEAD)
        desk.cluster.join(session("o1", "decode", 3, model=OTHER))
        holder = await (await desk.want(10))
        waiting = [await desk.want(10) for _ in range(2 * LOOK_AHEAD)]
        placed = await asyncio.wait_for(await desk.want(10, model=OTHER), 5)
        assert placed.placement.decode.node == "o1"
        assert desk.dispatcher.queued == len(waiting)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        holder.release()
        placed.release()

    run(test())


def test_placed_and_cancelled_in_one_turn() -> None:
    """B25: the place that a client never took is free again."""

    async def test() -> None:
        desk = Desk(slots=1)
        holder = await (await desk.want(10))
        leaver = await desk.want(10)
        behind = await desk.want(10)
        desk.dispatcher.poke()
        holder.release()
        await asyncio.sleep(0)  # the poke gives the place to `leaver`, who does not know it yet
        assert desk.counted() == [("d1", 1, 1)]
        leaver.cancel()
        placed = await behind
        assert leaver.cancelled()
        assert desk.counted() == [("d1", 1, 1)]
        placed.release()
        assert desk.counted() == []

    run(test())


def test_cancelled_before_it_is_placed() -> None:
    async def test() -> None:
        desk = Desk(slots=1)
        holder = await (await desk.want(10))
        leaver = await desk.want(10)
        holder.release()
        desk.dispatcher.poke()
        leaver.cancel()  # in the same turn, before the poke comes
        await asyncio.gather(leaver, return_exceptions=True)
        assert leaver.cancelled()
        assert (desk.counted(), desk.dispatcher.queued) == ([], 0)

    run(test())


def test_a_request_that_is_placed_again_is_never_refused() -> None:
    async def test() -> None:
        desk = Desk(slots=1)
        holder = await (await desk.want(10))
        waiting = [await desk.want(10) for _ in range(3)]
        with pytest.raises(NoCapacity):
            await (await desk.want(10))
        again = await desk.want(10, again=True)
        for task in (*waiting, again):
            holder.release()
            desk.dispatcher.poke()
            holder = await task
        holder.release()
        assert desk.counted() == []

    run(test())


def test_estimate() -> None:
    async def test() -> None:
        desk = Desk(slots=1)
        estimate = desk.dispatcher.estimate_s
        assert estimate(desk.cluster.view()) == 0
        holder = await (await desk.want(1000))
        assert estimate(desk.cluster.view()) > 0  # no slot is left
        waiting = await desk.want(1000)
        later = estimate(desk.cluster.view())
        assert later >= 1000 / 1000.0  # a thousand tokens wait before it, at the unmeasured rate
        holder.release()
        desk.dispatcher.poke()
        (await waiting).release()
        assert estimate(desk.cluster.view()) == 0

    run(test())


def test_a_node_that_is_lost_between_placing_and_telling() -> None:
    """B23: the request must not wait for the answer of a node that never heard of it."""

    async def test() -> None:
        router = Router(
            REGION,
            TOPOLOGY.limits,
            reader=Reader(TOPOLOGY, {MODEL: ByteText()}),
            metrics=RouterMetrics(CollectorRegistry()),
            prefixes=no_prefixes(),
            changed=lambda: None,
        )
        first, second = session("d1", "decode", 1, slots=1), session("d2", "decode", 2)
        router.joined(first)
        decoder = event_decoder()
        events: list[Event] = []

        async def write(data: bytes) -> None:
            events.extend(decoder.feed(data))

        busy = asyncio.create_task(router.serve(ask("a", request_id="busy"), write))
        attempt = attempt_of(await first.next_outgoing())
        waits = asyncio.create_task(router.serve(ask("b", request_id="waits"), write))
        await asyncio.sleep(0)
        assert router.dispatcher.queued == 1
        busy.cancel()
        while router.dispatcher.queued:  # until the poke has given the place away
            await asyncio.sleep(0)
        first.end("lost at this very moment")
        router.ended(first)
        router.joined(second)
        start = await second.next_outgoing()
        assert attempt_of(start) != attempt
        assert start.start.work.token_ids == [ord("b")]
        failed = pb.Failed(attempt_id=attempt_of(start), stage="decode", code="invalid_request")
        router.received(second, pb.NodeMessage(failed=failed))
        await waits
        assert isinstance(events[-1], Fault)
        assert events[-1].code == "invalid_request"
        assert router.active == 0

    run(test())


def test_errors_of_ours_end_the_request_with_a_name(caplog: pytest.LogCaptureFixture) -> None:
    """And say nothing of the prompt, neither to the client nor in the log."""

    class Broken(ByteText):
        def encode_prompt(self, prompt: object, *, at_most: int | None = None) -> list[int]:
            raise ValueError(f"cannot read {prompt}")

    async def played() -> list[Event]:
        router = Router(
            REGION,
            TOPOLOGY.limits,
            reader=Reader(TOPOLOGY, {MODEL: Broken()}),
            metrics=RouterMetrics(CollectorRegistry()),
            prefixes=no_prefixes(),
            changed=lambda: None,
        )
        written: list[bytes] = []

        async def write(data: bytes) -> None:
            written.append(data)

        await router.serve(ask("my secret"), write)
        return list(event_decoder().feed(b"".join(written)))

    [fault] = run(played())
    assert isinstance(fault, Fault)
    assert fault.code == "internal_error"
    assert "ValueError" in caplog.text
    assert "secret" not in caplog.text + fault.message
