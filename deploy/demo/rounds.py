"""The four requests of the demo, and what must be true of their answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from core.status import NodeStatus
from deploy.client import Answer, Turn
from deploy.hints import QUESTION

HANDBOOK = Path(__file__).parent / "handbook.md"
FACT = QUESTION
"""Without the second sentence this small model hesitates between English and French: its best two
first tokens are 0.08 apart, less than the rounding of bf16; with it 1.5."""
EDITIONS = 3
"""Of the handbook: so often it is asked for a split that pays."""
CACHED_SHARE = 0.8
"""Of its prompt that the second edge's request must find already read."""


@dataclass(frozen=True, slots=True)
class Round:
    number: str
    title: str
    edge: str
    turns: tuple[Turn, ...]
    stop: tuple[str, ...] = ()

    @property
    def question(self) -> str:
        return self.turns[-1].content


@dataclass(frozen=True, slots=True)
class Result:
    round: Round
    answer: Answer


def rounds(edition: int = 1) -> tuple[Round, ...]:
    """`edition`: of the handbook; nobody has read a later one because of an earlier one."""
    text = HANDBOOK.read_text(encoding="utf-8")
    heading = "" if edition == 1 else f"Edition {edition}\n\n"
    handbook = Turn("system", heading + text)

    def about_handbook(question: str) -> tuple[Turn, ...]:
        return (handbook, Turn("user", question))

    return (
        Round(
            "①", "New York sends a long handbook with a question: nobody has read it yet", "nyc",
            about_handbook("Who founded the company, and in which year?"),
        ),
        Round(
            "②", "Amsterdam sends the same handbook with another question", "ams",
            about_handbook("When does the first boat leave the mainland?"),
            stop=(".",),  # so small a model says one true sentence, then repeats itself
        ),
        Round(
            "③", "Amsterdam asks something short: the nearest region answers", "ams",
            (Turn("user", "Which is the largest ocean on Earth?"),),
        ),
        Round(
            "④", "New York asks a fact", "nyc",
            (Turn("user", FACT),),
        ),
    )  # fmt: skip


def stayed(answer: Answer) -> bool:
    """Whether the region let one node do it all, since by its rates two would not be quicker: what
    it knows of nodes that have just started is little, and each prompt teaches it more."""
    return answer.trace.node_reason == "split_does_not_pay"


def missed(results: Sequence[Result], nodes: Sequence[NodeStatus]) -> list[str]:
    """The conditions that do not hold, each in one line; none for a demo that worked.

    `nodes`: what the routers say of all nodes after the last round.
    """
    cold, warm, _near, fact = (result.answer for result in results)
    faults: list[str] = []
    if not _crossed(cold, nodes):
        faults.append(
            "① KV did not cross between two processes: "
            f"read by {cold.trace.prefill or cold.trace.decode or 'nobody'}, "
            f"answered by {cold.trace.decode or 'nobody'}, {cold.trace.kv_bytes} bytes moved "
            f"({cold.trace.node_reason or 'no reason told'})"
        )
    if cold.trace.region != warm.trace.region or cold.trace.edge == warm.trace.edge:
        faults.append(
            "② two edges did not agree on a region: "
            f"{cold.trace.edge or '?'} took {cold.trace.region or '?'}, "
            f"{warm.trace.edge or '?'} took {warm.trace.region or '?'}"
        )
    if warm.prompt_tokens == 0 or warm.cached_tokens < CACHED_SHARE * warm.prompt_tokens:
        faults.append(
            f"② only {warm.cached_tokens} of {warm.prompt_tokens} prompt tokens were cached, "
            f"less than {CACHED_SHARE:.0%}"
        )
    if "paris" not in fact.text.lower():
        faults.append(f"④ the answer does not say Paris: {fact.text.strip()[:60]!r}")
    return faults


def _crossed(answer: Answer, nodes: Sequence[NodeStatus]) -> bool:
    """Whether KV went from one process to another, as the answer and both nodes say."""
    trace = answer.trace
    if trace.prefill is None or trace.prefill == trace.decode or trace.kv_bytes <= 0:
        return False
    by_name: dict[str, NodeStatus] = {node.name: node for node in nodes}
    sender, receiver = by_name.get(trace.prefill), by_name.get(trace.decode or "")
    return bool(
        sender
        and receiver
        and sender.pid != receiver.pid
        and sender.kv_bytes_sent > 0
        and receiver.kv_bytes_received > 0
    )
