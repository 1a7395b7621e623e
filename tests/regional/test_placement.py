"""Placement as a table: a view, what is cached where, and where the prompt must go."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ContextLengthExceeded, RegionUnavailable
from core.types import ModelName, NodeName, PoolId, Role
from regional import costs
from regional.cluster import ClusterView, NodeView, Offer
from regional.kv_index import Held
from regional.placement import Ask, Placement, Reason, Scarce, Wait, place, takes_prompt

MODEL = ModelName("m")
P, P2, D, D2, C = (PoolId(NodeName(name)) for name in ("p", "p2", "d", "d2", "c"))


def node(pool: PoolId, role: Role, **changes: object) -> NodeView:
    view = NodeView(
        name=pool.node,
        dp_rank=pool.dp_rank,
        serial=sum(pool.node.encode()),
        role=role,
        offers=(Offer(MODEL, b"f", 8192, 1024),),
        max_sequences=8,
        max_step_tokens=512,
        prefill_tokens_per_s=1000.0,
        decode_tokens_per_s=50.0,
    )
    return replace(view, **changes)  # type: ignore[arg-type]  # one helper for all fields


PREFILL, DECODE = node(P, Role.PREFILL), node(D, Role.DECODE)
SECOND_PREFILL, SECOND_DECODE = node(P2, Role.PREFILL), node(D2, Role.DECODE)
COMBINED = node(C, Role.COMBINED)
OTHER_WEIGHTS = (Offer(MODEL, b"other", 8192, 1024),)


def placed(
    *nodes: NodeView,
    tokens: int = 1501,
    cached: dict[PoolId, int] | None = None,
    ask: Ask | None = None,
    split_min_tokens: int = 256,
) -> Placement | Wait:
    request = ask or Ask(model=MODEL, prompt_tokens=tokens, max_tokens=64)
    held = {pool: Held(blocks) for pool, blocks in (cached or {}).items()}
    return place(ClusterView(nodes), held, request, split_min_tokens=split_min_tokens)


ONE_TOKEN = Ask(model=MODEL, prompt_tokens=1501, max_tokens=1)
RECOMPUTE = Ask(model=MODEL, prompt_tokens=1501, max_tokens=64, recompute=True)
BUSY_PREFILL = replace(PREFILL, prefills=1, prefill_tokens=1000)
LIGHT_PREFILL = replace(PREFILL, prefills=1, prefill_tokens=300)
WORKING = replace(DECODE, sequences=1)
SLOW_PREFILL = replace(PREFILL, prefill_tokens_per_s=250.0)
HEAVY = (Offer(MODEL, b"f", 8192, 1024, block_bytes=360_000),)
HEAVY_DECODE = replace(DECODE, offers=HEAVY)
SLOW_LINK = replace(PREFILL, offers=HEAVY, kv_bytes_per_s=7e6)

TABLE: list[tuple[str, Placement | Wait, PoolId | None, PoolId, Reason]] = [
    ("cold and long", placed(PREFILL, DECODE), P, D, Reason.SPLIT),
    ("remainder below the limit", placed(PREFILL, DECODE, tokens=256), None, D,
     Reason.SHORT_REMAINDER),
    ("remainder at the limit", placed(PREFILL, DECODE, tokens=257), P, D, Reason.SPLIT),
    ("nearly all cached at decode", placed(PREFILL, DECODE, cached={D: 80}), None, D,
     Reason.CACHED_ON_DECODE),
    ("cached at both", placed(PREFILL, DECODE, cached={D: 50, P: 50}), P, D, Reason.SPLIT),
    ("idle decode knows most of it", placed(PREFILL, DECODE, cached={D: 60}), None, D,
     Reason.CACHED_ON_DECODE),
    ("working decode knows most of it", placed(PREFILL, WORKING, cached={D: 60}), P, D,
     Reason.SPLIT),
    ("no prefill node", placed(DECODE), None, D, Reason.NO_PREFILL_NODE),
    ("prefill node of other weights", placed(replace(PREFILL, offers=OTHER_WEIGHTS), DECODE),
     None, D, Reason.NO_PREFILL_NODE),
    ("draining prefill node", placed(replace(PREFILL, draining=True), DECODE), None, D,
     Reason.NO_PREFILL_NODE),
    ("one combined node", placed(COMBINED), None, C, Reason.COMBINED),
    ("combined helped by prefill", placed(COMBINED, PREFILL), P, C, Reason.SPLIT),
    ("one token is never split", placed(PREFILL, DECODE, ask=ONE_TOKEN), None, D,
     Reason.ONE_TOKEN),
    ("after a failed hand-off", placed(PREFILL, DECODE, ask=RECOMPUTE), None, D,
     Reason.RECOMPUTE),
    ("prefill busy, decode idle", placed(BUSY_PREFILL, DECODE), None, D, Reason.PREFILL_BUSY),
    ("two short prompts fit one backlog", placed(LIGHT_PREFILL, WORKING, tokens=600), P, D,
     Reason.SPLIT),
    ("the prefill node with less before it", placed(LIGHT_PREFILL, SECOND_PREFILL, DECODE,
     tokens=600), P2, D, Reason.SPLIT),
    ("the prefill node that knows it", placed(PREFILL, SECOND_PREFILL, DECODE, cached={P2: 10}),
     P2, D, Reason.SPLIT),
    ("a prefill node far slower than decode", placed(SLOW_PREFILL, DECODE), None, D,
     Reason.NO_GAIN),
    ("the same beside five running streams", placed(SLOW_PREFILL, replace(DECODE, sequences=5)),
     P, D, Reason.SPLIT),
    ("a link that takes longer than reading twice", placed(SLOW_LINK, HEAVY_DECODE), None, D,
     Reason.NO_GAIN),
    ("the same link for the end alone, and streams run", placed(SLOW_LINK,
     replace(HEAVY_DECODE, sequences=3), cached={D: 73, P: 93}), P, D, Reason.SPLIT),
    ("a fresh decode node draws no herd", placed(replace(DECODE, sequences=1, share=0.1),
     replace(SECOND_DECODE, sequences=3)), None, D2, Reason.NO_PREFILL_NODE),
    ("a fresh prefill node has less room", placed(replace(LIGHT_PREFILL, share=0.1),
     replace(SECOND_PREFILL, prefills=1, prefill_tokens=600),
     replace(DECODE, sequences=2), tokens=400), P2, D,
     Reason.SPLIT),
    ("the decode node that knows it", placed(DECODE, SECOND_DECODE, cached={D2: 10}), None, D2,
     Reason.NO_PREFILL_NODE),
    ("the decode node with less work", placed(WORKING, SECOND_DECODE), None, D2,
     Reason.NO_PREFILL_NODE),
    ("cache outweighs a little work", placed(WORKING, SECOND_DECODE, cached={D: 90}), None, D,
     Reason.CACHED_ON_DECODE),
    ("cache does not outweigh a crowd (B21)", placed(replace(DECODE, sequences=6), SECOND_DECODE,
     cached={D: 90}), None, D2, Reason.NO_PREFILL_NODE),
    ("a full decode node", placed(replace(DECODE, sequences=8), SECOND_DECODE, cached={D: 90}),
     None, D2, Reason.NO_PREFILL_NODE),
]  # fmt: skip


@pytest.mark.parametrize(
    ("decision", "prefill", "decode", "reason"),
    [row[1:] for row in TABLE],
    ids=[row[0] for row in TABLE],
)
def test_table(
    decision: Placement | Wait, prefill: PoolId | None, decode: PoolId, reason: Reason
) -> None:
    assert isinstance(decision, Placement)
    assert (decision.prefill, decision.decode, decision.reason) == (prefill, decode, reason)


def test_pools_of_one_node_are_told_apart() -> None:
    """Data-parallel attention: each has its own blocks, its own work and its own refusals."""
    first, second = node(D, Role.DECODE), node(D, Role.DECODE, dp_rank=1)
    decision = placed(first, second, cached={second.pool: 90})
    assert isinstance(decision, Placement)
    assert decision.decode == PoolId(D.node, 1)
    assert decision.cached_tokens == 1440
    crowded = placed(first, replace(second, sequences=6), cached={second.pool: 90})
    assert isinstance(crowded, Placement)
    assert crowded.decode == D
    refused = Ask(model=MODEL, prompt_tokens=9, max_tokens=1, refused={first.key: 0})
    elsewhere = placed(first, second, ask=refused)
    assert isinstance(elsewhere, Placement)
    assert elsewhere.decode == second.pool
    readers = [node(P, Role.PREFILL), node(P, Role.PREFILL, dp_rank=1)]
    split = placed(*readers, DECODE, cached={readers[1].pool: 30})
    assert isinstance(split, Placement)
    assert split.prefill == readers[1].pool


def test_computed_and_cached_add_up() -> None:
    split = placed(PREFILL, DECODE, cached={P: 10})
    direct = placed(DECODE, cached={D: 10})
    assert isinstance(split, Placement)
    assert isinstance(direct, Placement)
    assert (split.compute_tokens, split.cached_tokens) == (1340, 160)
    assert (direct.compute_tokens, direct.cached_tokens) == (1341, 160)


def test_waits() -> None:
    assert placed(BUSY_PREFILL, WORKING) == Wait(Scarce.PREFILL)
    reading = replace(DECODE, prefill_tokens=1)
    assert placed(BUSY_PREFILL, reading) == Wait(Scarce.PREFILL)
    assert placed(PREFILL, replace(DECODE, sequences=8)) == Wait(Scarce.DECODE)


def test_a_refusal_holds_until_something_changes() -> None:
    refused = Ask(model=MODEL, prompt_tokens=9, max_tokens=1, refused={DECODE.key: 3})
    assert placed(replace(DECODE, changes=3), ask=refused) == Wait(Scarce.DECODE)
    assert isinstance(placed(replace(DECODE, changes=4), ask=refused), Placement)


def test_nobody_serves_it() -> None:
    gone = Ask(model=MODEL, prompt_tokens=9, max_tokens=1, excluded=frozenset({DECODE.serial}))
    for nodes, ask in (
        ((), None),
        ((PREFILL,), None),
        ((replace(DECODE, draining=True),), None),
        ((DECODE,), gone),
        ((DECODE,), Ask(model=ModelName("another"), prompt_tokens=9, max_tokens=1)),
    ):
        with pytest.raises(RegionUnavailable):
            placed(*nodes, ask=ask)


def test_a_pool_that_is_too_small_for_anyone() -> None:
    """B12, B23: it would wait for ever."""
    small = replace(DECODE, offers=(Offer(MODEL, b"f", 8192, 10),))
    with pytest.raises(ContextLengthExceeded, match="160"):
        placed(small, tokens=161)
    decision = placed(small, SECOND_DECODE, tokens=161)
    assert isinstance(decision, Placement)
    assert decision.decode == D2


def test_room_that_is_away_for_the_moment_is_not_the_callers_fault() -> None:
    """Another region may answer, or this one later: no 400."""
    small = replace(DECODE, offers=(Offer(MODEL, b"f", 8192, 10),))
    ask = Ask(model=MODEL, prompt_tokens=161, max_tokens=64)
    failed = replace(ask, excluded=frozenset({SECOND_DECODE.serial}))
    for large, wanted in ((replace(SECOND_DECODE, draining=True), ask), (SECOND_DECODE, failed)):
        with pytest.raises(RegionUnavailable, match="room"):
            placed(small, large, ask=wanted)


def test_a_hot_prefix_spreads_within_the_bound() -> None:
    """B21: everyone shares one prefix that one of eight nodes holds; work stays within
    max(1.25 × mean, mean + 2) and the cache's holder is used as far as that allows."""
    names = [PoolId(NodeName(f"d{n}")) for n in range(8)]
    load = dict.fromkeys(names, 0)
    for _ in range(40):
        nodes = [node(n, Role.DECODE, sequences=load[n], max_sequences=64) for n in names]
        decision = placed(*nodes, tokens=4001, cached={names[3]: 250})
        assert isinstance(decision, Placement)
        load[decision.decode] += 1
        mean = sum(load.values()) / len(load)
        assert max(load.values()) <= max(1.25 * mean, mean + 2) + 1
    assert max(load, key=load.__getitem__) == names[3]
    assert min(load.values()) > 0


PULLING = Ask(model=MODEL, prompt_tokens=1501, max_tokens=64, may_pull=True)


def pull_of(
    *nodes: NodeView, cached: dict[PoolId, int], ask: Ask = PULLING
) -> tuple[PoolId, int, int] | None:
    decision = placed(*nodes, cached=cached, ask=ask)
    assert isinstance(decision, Placement)
    if decision.pull is None:
        return None
    assert decision.pull.patience_s >= 0.5
    return decision.pull.source, decision.pull.first, decision.pull.count


def test_the_reader_pulls_what_another_holds() -> None:
    """From a prefill node, from a crowded decode node, from the decode node of the very attempt."""
    crowded = replace(SECOND_DECODE, sequences=8)
    assert pull_of(DECODE, crowded, cached={D2: 80}) == (D2, 0, 80)
    assert pull_of(DECODE, crowded, cached={D: 30, D2: 80}) == (D2, 30, 50)
    assert pull_of(PREFILL, replace(DECODE, sequences=2), cached={D: 40}) == (D, 0, 40)
    decision = placed(DECODE, crowded, cached={D: 30, D2: 80}, ask=PULLING)
    assert isinstance(decision, Placement)
    assert (decision.cached_tokens, decision.compute_tokens) == (480, 1501 - 1280)


def test_nothing_is_pulled_that_is_computed_as_fast() -> None:
    holder = replace(SECOND_DECODE, sequences=8, offers=HEAVY)
    needs = replace(DECODE, offers=HEAVY)
    break_even = 360_000 * 80 / (80 * 16 / 1000.0 - costs.ROUND_TRIP_S)
    for bytes_per_s, pulls in ((break_even * 1.001, True), (break_even * 0.999, False)):
        source = replace(holder, kv_bytes_per_s=bytes_per_s)
        assert (pull_of(needs, source, cached={D2: 80}) is not None) is pulls


def test_no_pull_from_where_it_cannot_come() -> None:
    crowded = replace(SECOND_DECODE, sequences=8)
    cached = {D2: 80}
    assert pull_of(DECODE, replace(crowded, draining=True), cached=cached) is None
    assert pull_of(DECODE, replace(crowded, offers=OTHER_WEIGHTS), cached=cached) is None
    assert pull_of(DECODE, replace(crowded, sends=False), cached=cached) is None
    assert pull_of(DECODE, crowded, cached=cached) is not None
    lost = replace(PULLING, excluded=frozenset({crowded.serial}))
    assert pull_of(DECODE, crowded, cached=cached, ask=lost) is None
    for ask in (replace(PULLING, recompute=True), replace(PULLING, may_pull=False)):
        assert pull_of(DECODE, crowded, cached=cached, ask=ask) is None
    below = {crowded.pool: Held(80, below=1)}
    plan = place(ClusterView((DECODE, crowded)), below, PULLING, split_min_tokens=256)
    assert isinstance(plan, Placement)
    assert plan.pull is None  # its owner would have to load it first


def test_a_tier_below_memory_is_cheaper_than_computing_and_dearer_than_memory() -> None:
    nodes = [replace(one, offers=HEAVY) for one in (DECODE, SECOND_DECODE)]
    nodes = [replace(one, tier_bytes_per_s=1e8) for one in nodes]
    for held, chosen in (
        ({D2: Held(50, below=50)}, D2),
        ({D: Held(50), D2: Held(50, below=50)}, D),
        ({D: Held(20), D2: Held(50, below=50)}, D2),
    ):
        ask = Ask(model=MODEL, prompt_tokens=1501, max_tokens=64)
        plan = place(ClusterView(tuple(nodes)), held, ask, split_min_tokens=256)
        assert isinstance(plan, Placement)
        assert plan.decode == chosen


_pool = st.sampled_from((P, P2, D, D2, C))


@st.composite
def _views(draw: st.DrawFn) -> tuple[ClusterView, dict[PoolId, Held]]:
    roles = {P: Role.PREFILL, P2: Role.PREFILL, D: Role.DECODE, D2: Role.DECODE, C: Role.COMBINED}
    pools = draw(st.lists(_pool, min_size=1, max_size=5, unique=True))
    nodes, held = [], {}
    for pool in pools:
        prefills = draw(st.integers(0, 2))
        nodes.append(
            node(
                pool,
                roles[pool],
                offers=HEAVY,
                prefills=prefills,
                prefill_tokens=prefills * draw(st.integers(0, 900)),
                sequences=draw(st.integers(0, 8)),
                share=draw(st.sampled_from((1.0, 0.3))),
                draining=draw(st.sampled_from((False, False, False, True))),
                prefill_tokens_per_s=draw(st.sampled_from((100.0, 1000.0, 20000.0))),
                kv_bytes_per_s=draw(st.sampled_from((1e6, 1e8, 1e10))),
            )
        )
        blocks = draw(st.integers(0, 93))
        held[pool] = Held(blocks, draw(st.integers(0, blocks)))
    return ClusterView(tuple(nodes)), held


@given(_views(), st.booleans(), st.sampled_from((0, 256)))
def test_whatever_is_placed_adds_up_and_may_be_placed(
    world: tuple[ClusterView, dict[PoolId, Held]], may_pull: bool, split_min_tokens: int
) -> None:
    view, held = world
    by_pool = {one.pool: one for one in view.nodes}
    ask = replace(PULLING, may_pull=may_pull)
    try:
        decision = place(view, held, ask, split_min_tokens=split_min_tokens)
    except RegionUnavailable:
        assert not view.decoders()
        return
    if isinstance(decision, Wait):
        full = all(one.sequences >= one.max_sequences for one in view.decoders())
        assert full if decision.scarce is Scarce.DECODE else not full
        return
    reader = by_pool[decision.prefill or decision.decode]
    pulled = decision.pull.tokens if decision.pull else 0
    last = 0 if decision.prefill else 1
    assert decision.compute_tokens + decision.cached_tokens + pulled == 1500 + last
    assert decision.cached_tokens == held[reader.pool].blocks * 16
    assert not reader.draining
    assert not by_pool[decision.decode].draining
    assert by_pool[decision.decode].sequences < 8
    if decision.prefill:
        assert takes_prompt(reader, decision.compute_tokens)
        assert decision.split_s is not None
        assert decision.alone_s is not None
        assert decision.split_s < decision.alone_s
    if decision.pull is not None:
        source = by_pool[decision.pull.source]
        assert may_pull
        assert held[source.pool] == Held(decision.pull.first + decision.pull.count)
        seconds = costs.pull_s(decision.pull.count, 360_000, source)
        assert seconds < pulled / reader.prefill_tokens_per_s


@pytest.mark.parametrize(
    "nodes", [(), (PREFILL,), (replace(DECODE, draining=True),), (replace(DECODE, offers=()),)]
)
def test_a_cold_model_is_waited_for_where_one_is_started(nodes: tuple[NodeView, ...]) -> None:
    request = Ask(model=MODEL, prompt_tokens=1501, max_tokens=64)
    cold = ClusterView(nodes, frozenset({MODEL}))
    assert place(cold, {}, request, split_min_tokens=256) == Wait(Scarce.COLD)
    with pytest.raises(RegionUnavailable):
        place(ClusterView(nodes), {}, request, split_min_tokens=256)


def test_a_node_that_failed_this_request_is_no_cold_model() -> None:
    request = Ask(
        model=MODEL, prompt_tokens=1501, max_tokens=64, excluded=frozenset({DECODE.serial})
    )
    with pytest.raises(RegionUnavailable):
        place(ClusterView((DECODE,), frozenset({MODEL})), {}, request, split_min_tokens=256)
