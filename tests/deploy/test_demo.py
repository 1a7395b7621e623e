"""The demo's verdict by table, and that what it asks can be answered from the handbook."""

import io
from dataclasses import replace

import msgspec
import pytest
from rich.console import Console

from core.status import NodeStatus
from core.types import ModelName, NodeName, Role
from deploy.client import Answer, Trace
from deploy.demo.rounds import EDITIONS, HANDBOOK, Result, missed, rounds, stayed
from deploy.demo.table import results_table, size


def answer(text: str, prompt: int, cached: int, trace: Trace) -> Answer:
    return Answer(text, "stop", prompt, cached, 10, 0.5, 1.0, trace)


COLD = answer(
    "herring",
    1500,
    0,
    Trace(
        edge="nyc",
        region="eu",
        prefill="eu-prefill-1",
        decode="eu-decode-1",
        reason="prefix_home",
        node_reason="short_remainder",
        kv_bytes=33_000_000,
    ),
)
WARM = answer(
    "seven", 1480, 1472, Trace(edge="ams", region="eu", decode="eu-decode-1", reason="prefix_home")
)
NEAR = answer(
    "whales", 40, 0, Trace(edge="ams", region="eu", decode="eu-decode-1", reason="nearest_short")
)
FACT = answer(
    "It is Paris.",
    40,
    0,
    Trace(edge="nyc", region="us", decode="us-decode-1", reason="nearest_short"),
)
GOOD = (COLD, WARM, NEAR, FACT)


def node(name: str, pid: int, sent: int = 0, received: int = 0) -> NodeStatus:
    return NodeStatus(
        name=NodeName(name), role=Role.COMBINED, model=ModelName("m"), pid=pid,
        kv_bytes_sent=sent, kv_bytes_received=received,
    )  # fmt: skip


NODES = (node("eu-prefill-1", 1, sent=33), node("eu-decode-1", 2, received=33))


def verdict(answers: tuple[Answer, ...], nodes: tuple[NodeStatus, ...] = NODES) -> list[str]:
    results = [Result(one, got) for one, got in zip(rounds(), answers, strict=True)]
    return missed(results, nodes)


def traced(answer: Answer, **changes: object) -> Answer:
    return replace(answer, trace=msgspec.structs.replace(answer.trace, **changes))


def test_a_demo_that_worked_misses_nothing() -> None:
    assert verdict(GOOD) == []


@pytest.mark.parametrize(
    ("answers", "line"),
    [
        ((traced(COLD, prefill=None), WARM, NEAR, FACT), "① KV did not cross"),
        ((traced(COLD, prefill="eu-decode-1"), WARM, NEAR, FACT), "① KV did not cross"),
        ((traced(COLD, kv_bytes=0), WARM, NEAR, FACT), "① KV did not cross"),
        ((COLD, traced(WARM, region="us"), NEAR, FACT), "② two edges did not agree"),
        ((COLD, traced(WARM, edge="nyc"), NEAR, FACT), "② two edges did not agree"),
        ((COLD, replace(WARM, cached_tokens=1000), NEAR, FACT), "② only 1000 of 1480"),
        ((COLD, replace(WARM, prompt_tokens=0, cached_tokens=0), NEAR, FACT), "② only 0 of 0"),
        ((COLD, WARM, NEAR, replace(FACT, text="It is Rome.")), "④ the answer does not say Paris"),
    ],
)
def test_each_missed_condition_is_one_line(answers: tuple[Answer, ...], line: str) -> None:
    faults = verdict(answers)
    assert len(faults) == 1
    assert faults[0].startswith(line)
    assert "\n" not in faults[0]


@pytest.mark.parametrize(
    "nodes",
    [
        (),
        (node("eu-prefill-1", 1, sent=33), node("eu-decode-1", 1, received=33)),
        (node("eu-prefill-1", 1), node("eu-decode-1", 2, received=33)),
        (node("eu-prefill-1", 1, sent=33), node("eu-decode-1", 2)),
    ],
    ids=["unknown", "same process", "nothing sent", "nothing received"],
)
def test_the_nodes_must_confirm_the_crossing(nodes: tuple[NodeStatus, ...]) -> None:
    assert [fault[:19] for fault in verdict(GOOD, nodes)] == ["① KV did not cross "]


def test_rounds_share_one_handbook_over_two_edges() -> None:
    cold, warm, near, fact = rounds()
    assert (cold.edge, warm.edge, near.edge, fact.edge) == ("nyc", "ams", "ams", "nyc")
    assert cold.turns[0] == warm.turns[0]
    assert cold.question != warm.question
    text = HANDBOOK.read_text(encoding="utf-8")
    assert 5500 < len(text.encode()) < 7500
    assert "founded in 1911 by the sisters Agnes and Moira Tarbet" in text
    assert "leaves the mainland at half past five in the morning" in text


def test_a_later_edition_is_read_anew_and_by_both_edges() -> None:
    first = rounds()
    for edition in range(2, EDITIONS + 1):
        cold, warm, near, fact = rounds(edition)
        assert cold.turns[0] == warm.turns[0]
        assert cold.turns[0].content[:16] != first[0].turns[0].content[:16]
        assert HANDBOOK.read_text(encoding="utf-8") in cold.turns[0].content
        assert (near, fact) == first[2:]


def test_only_who_saw_no_gain_is_asked_again() -> None:
    assert stayed(traced(COLD, prefill=None, node_reason="split_does_not_pay"))
    assert not stayed(COLD)
    assert not stayed(traced(COLD, prefill=None, node_reason="no_prefill_node"))


def test_table_shows_every_round() -> None:
    out = io.StringIO()
    results = [Result(one, got) for one, got in zip(rounds(), GOOD, strict=True)]
    Console(file=out, width=80).print(results_table(results))
    text = out.getvalue()
    for part in (
        "①",
        "→ eu-decode-1",
        "1472",
        "33.0 MB",
        "0.50 s",
        "18",
        "prefix_home",
        "short_remainder",
    ):
        assert part in text
    assert "…" not in text  # everything fits a terminal of 80 columns


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (512, "512 B"), (1500, "1.5 kB"), (33_400_000, "33.4 MB")]
)
def test_size(count: int, text: str) -> None:
    assert size(count) == text
