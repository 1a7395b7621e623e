"""Placement as a table: a view, what is cached where, and where the prompt must go."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.errors import ContextLengthExceeded, RegionUnavailable
from core.types import ModelName, NodeName, PoolId, Role
from regional.cluster import ClusterView, NodeView, Offer
from regional.placement import Ask, Placement, Reason, Scarce, Wait, place

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
) -> Placement | Wait:
    request = ask or Ask(model=MODEL, prompt_tokens=tokens, max_tokens=64)
    return place(ClusterView(nodes), cached or {}, request, split_min_tokens=256)


ONE_TOKEN = Ask(model=MODEL, prompt_tokens=1501, max_tokens=1)
RECOMPUTE = Ask(model=MODEL, prompt_tokens=1501, max_tokens=64, recompute=True)
BUSY_PREFILL = replace(PREFILL, prefills=1, prefill_tokens=1000)
LIGHT_PREFILL = replace(PREFILL, prefills=1, prefill_tokens=300)
WORKING = replace(DECODE, sequences=1)

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
