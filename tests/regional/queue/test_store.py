"""The queue on disk: what is kept, what is bounded, what a restart leaves."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from core.batches import KEEP_S, BatchState, QueuedItem, Submission
from core.errors import ConfigError, NoCapacity
from core.events import Delta, Done, Event, Fault, Finish, event_decoder
from core.types import FinishReason, GenerateRequest, ModelName, RequestId, Usage
from regional.queue import store as store_module
from regional.queue.rules import MAX_TRIES, Again, Answered
from regional.queue.store import ORPHAN_S, Job, Store

NOW = 1_000_000.0
ANSWER: tuple[Event, ...] = (
    Delta(text="yes"),
    Finish(reason=FinishReason.STOP),
    Done(usage=Usage(prompt_tokens=3, completion_tokens=1)),
)


def batch(name: str = "b1", size: int = 2, *, namespace: str = "", said: str = "x") -> Submission:
    items = tuple(
        QueuedItem(
            request=GenerateRequest(
                id=RequestId(f"{name}-{i}"),
                model=ModelName("tiny"),
                prompt=f"{said} {i}",
                seed=1,
                rendered_at=0,
            ),
            note=b"n%d" % i,
            account=b"a%d" % i,
        )
        for i in range(size)
    )
    return Submission(id=name, namespace=namespace, model=ModelName("tiny"), items=items)


@pytest.fixture
def store() -> Iterator[Store]:
    one = Store(None)
    yield one
    one.close()


def _status(store: Store, name: str = "b1", namespace: str = "") -> str:
    state = store.state(name, namespace)
    return "unknown" if state is None else state.status


def _numbers(jobs: list[Job]) -> list[tuple[str, int]]:
    return [(job.batch, job.number) for job in jobs]


def test_a_batch_from_beginning_to_end(store: Store) -> None:
    assert store.add(batch(), NOW).status == "queued"
    assert _status(store) == "queued"
    first, second = store.claim(5, NOW)
    assert (first.request.prompt, second.request.prompt) == ("x 0", "x 1")
    assert _status(store) == "running"
    store.end(second, Answered(ANSWER), NOW)
    assert _status(store) == "running"
    fault = Fault(code="context_length_exceeded", message="too long")
    store.end(first, Answered((fault,)), NOW)
    state = store.state("b1", "")
    assert state is not None
    assert (state.status, state.model, state.told) == ("done", "tiny", False)
    assert [one.note for one in state.answers] == [b"n0", b"n1"]
    assert [one.request_id for one in state.answers] == ["b1-0", "b1-1"]
    assert [tuple(event_decoder().feed(one.events)) for one in state.answers] == [(fault,), ANSWER]
    used = {one.request_id: (one.account, one.outcome, one.usage) for one in store.owed("a")}
    nothing = Usage(prompt_tokens=0, completion_tokens=0)
    assert used == {
        "b1-0": (b"a0", "context_length_exceeded", nothing),
        "b1-1": (b"a1", "ok", Usage(prompt_tokens=3, completion_tokens=1)),
    }
    assert store.written("a", list(used)) == list(used)
    told = store.state("b1", "")
    assert told is not None
    assert told.told


def _answered(store: Store, name: str, size: int = 2, collector: str = "a") -> None:
    store.add(replace(batch(name, size), collector=collector), NOW)
    for job in store.claim(size, NOW):
        store.end(job, Answered(ANSWER), NOW)


def _owed(store: Store, collector: str) -> list[str]:
    return sorted(one.request_id for one in store.owed(collector))


def test_usage_is_owed_to_one_ledger_until_it_is_written_there(tmp_path: Path) -> None:
    path = tmp_path / "queue.sqlite"
    store = Store(path)
    _answered(store, "b1")
    _answered(store, "b2", collector="b")
    store.sweep(NOW + KEEP_S + 1)
    assert _status(store) == "unknown"  # the answers are gone, and what they used is not
    assert (_owed(store, "a"), _owed(store, "b"), _owed(store, "c")) == (
        ["b1-0", "b1-1"], ["b2-0", "b2-1"], [],
    )  # fmt: skip
    assert store.written("b", ["b1-0"]) == []  # not b's to write
    assert store.written("a", ["b1-0", "x"]) == ["b1-0"]
    assert store.written("a", ["b1-0"]) == []
    store.close()
    again = Store(path)
    assert (_owed(again, "a"), _owed(again, "b")) == (["b1-1"], ["b2-0", "b2-1"])
    again.close()


def test_what_a_ledger_that_is_gone_was_owed_is_the_next_ones() -> None:
    now = [0.0]
    store = Store(None, lambda: now[0])
    _answered(store, "b1")
    _answered(store, "b2", collector="")
    now[0] = ORPHAN_S - 1
    assert _owed(store, "b") == ["b2-0", "b2-1"]  # nobody's
    assert _owed(store, "a") == ["b1-0", "b1-1"]
    now[0] = 2 * ORPHAN_S - 2
    assert _owed(store, "b") == ["b2-0", "b2-1"]
    now[0] = 2 * ORPHAN_S
    assert _owed(store, "b") == ["b1-0", "b1-1", "b2-0", "b2-1"]
    assert _owed(store, "a") == []  # too late
    assert store.written("a", ["b1-0"]) == []
    store.close()


def test_what_is_purged_before_it_ran_is_owed_as_nothing(store: Store) -> None:
    """Its tenant was charged for it."""
    _answered(store, "b1", 1)
    store.add(replace(batch("b2", 2), collector="a"), NOW)
    store.claim(1, NOW)
    assert store.purge("") == 2
    owed = {one.request_id: (one.outcome, one.usage.prompt_tokens) for one in store.owed("a")}
    assert owed == {"b1-0": ("ok", 3), "b2-0": ("cancelled", 0), "b2-1": ("cancelled", 0)}


def test_many_come_in_pages(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "PAGE_ITEMS", 3)
    _answered(store, "b1", 7)
    pages = []
    while page := _owed(store, "a"):
        pages.append(len(page))
        store.written("a", page)
    assert pages == [3, 3, 1]


def test_a_file_of_another_release_is_not_guessed_at(tmp_path: Path) -> None:
    path = tmp_path / "queue.sqlite"
    Store(path).close()
    Store(path).close()
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(ConfigError, match="another release"):
        Store(path)


def test_of_its_namespace_alone(store: Store) -> None:
    store.add(batch(namespace="acme"), NOW)
    assert store.state("b1", "") is None
    assert store.state("b1", "other") is None
    assert _status(store, "b1", "acme") == "queued"


def test_handed_in_twice_is_once(store: Store) -> None:
    store.add(batch(), NOW)
    [job] = store.claim(1, NOW)
    assert store.add(batch(), NOW).status == "running"
    store.end(job, Answered(ANSWER), NOW)
    assert len(store.claim(9, NOW)) == 1


def test_an_answer_comes_once(store: Store) -> None:
    store.add(batch(), NOW)
    one, two = store.claim(2, NOW)
    for _ in range(3):
        store.end(one, Answered(ANSWER), NOW)
        assert _status(store) == "running"
    store.end(two, Answered(ANSWER), NOW)
    store.end(one, Again(1, 0.0), NOW + KEEP_S)
    store.end(two, Answered(ANSWER), NOW + KEEP_S)
    assert _status(store) == "done"
    assert store.claim(9, NOW) == []
    store.sweep(NOW + KEEP_S + 1)  # kept from its end, not from a word that came late
    assert _status(store) == "unknown"


def test_tried_again_after_its_pause(store: Store) -> None:
    store.add(batch(size=1), NOW)
    [job] = store.claim(9, NOW)
    store.end(job, Again(1, 5.0), NOW)
    assert store.claim(9, NOW + 4.9) == []
    [again] = store.claim(9, NOW + 5.1)
    assert (again.number, again.tries, again.request) == (0, 1, job.request)


def test_namespaces_take_turns(store: Store) -> None:
    store.add(batch("many", 50, namespace="greedy"), NOW)
    store.add(batch("few", 2, namespace="modest"), NOW + 1)
    claimed = _numbers(store.claim(6, NOW + 2))
    assert claimed.count(("few", 0)) == claimed.count(("few", 1)) == 1
    assert [one for one in claimed if one[0] == "many"] == [("many", i) for i in range(4)]


def test_a_full_queue_refuses_whole_batches(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_ITEMS", 3)
    store.add(batch("a", 2), NOW)
    with pytest.raises(NoCapacity) as refused:
        store.add(batch("b", 2), NOW)
    assert refused.value.retry_after_s
    assert _status(store, "b") == "unknown"
    store.add(batch("c", 1), NOW)
    for job in store.claim(9, NOW):
        store.end(job, Answered(ANSWER), NOW)
    store.add(batch("d", 3), NOW)


def test_bytes_are_bounded_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_BYTES", 1 << 20)
    store.add(batch("a", 4, said="x" * 200_000), NOW)
    with pytest.raises(NoCapacity):
        store.add(batch("b", 1, said="x" * 400_000), NOW)
    for job in store.claim(9, NOW):
        store.end(job, Answered(ANSWER), NOW)
    store.add(batch("b", 1, said="x" * 400_000), NOW)


def test_results_are_kept_for_a_day_and_then_forgotten(store: Store) -> None:
    store.add(batch(size=1), NOW)
    [job] = store.claim(1, NOW)
    store.end(job, Answered(ANSWER), NOW + 100)
    store.sweep(NOW + 100 + KEEP_S - 1)
    assert _status(store) == "done"
    store.sweep(NOW + 100 + KEEP_S + 1)
    assert _status(store) == "unknown"
    assert store.add(batch(size=1), NOW).status == "queued"  # nothing of it is left


def test_what_never_had_room_is_given_up(store: Store) -> None:
    store.add(batch(), NOW)
    [running] = store.claim(1, NOW)
    store.sweep(NOW + KEEP_S + 1)
    assert _status(store) == "running"
    store.end(running, Answered(ANSWER), NOW + KEEP_S + 2)
    state = store.state("b1", "")
    assert state is not None
    [fault] = event_decoder().feed(state.answers[1].events)
    assert isinstance(fault, Fault)
    assert fault.code == "deadline_exceeded"
    assert "24 hours" in fault.message


def test_a_restart_finds_everything(tmp_path: Path) -> None:
    path = tmp_path / "queue.sqlite"
    before = Store(path)
    before.add(batch(size=3), NOW)
    done, _ = before.claim(2, NOW)
    before.end(done, Answered(ANSWER), NOW)
    before.close()  # one is done, one runs, one waits
    for tries in range(1, MAX_TRIES):
        store = Store(path)
        store.recover(NOW)
        jobs = store.claim(1 if tries == 1 else 9, NOW)
        assert ("b1", 1, tries) in [(job.batch, job.number, job.tries) for job in jobs]
        store.close()
    last = Store(path)
    last.recover(NOW)
    jobs = last.claim(9, NOW)
    assert [job.number for job in jobs] == [2]  # the one that ran each time is given up
    last.end(jobs[0], Answered(ANSWER), NOW)
    state = last.state("b1", "")
    assert state is not None
    kinds = [tuple(event_decoder().feed(one.events))[-1] for one in state.answers]
    assert [type(kind) for kind in kinds] == [Done, Fault, Done]
    last.close()


def test_prompts_leave_the_disk_with_their_answers(tmp_path: Path) -> None:
    path = tmp_path / "queue.sqlite"
    store = Store(path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    canary = "a canary that nobody else would say " * 400
    store.add(batch(said=canary), NOW)
    assert b"canary" in path.read_bytes()
    for job in store.claim(9, NOW):
        store.end(job, Answered(ANSWER), NOW)
    held = b"".join(one.read_bytes() for one in tmp_path.iterdir())
    assert b"canary" not in held
    store.close()


def test_a_request_of_another_release_is_answered(store: Store) -> None:
    store.add(batch(), NOW)
    store._db.execute("UPDATE items SET request = ? WHERE number = 0", (b"\xc1",))
    assert [job.number for job in store.claim(9, NOW)] == [1]
    assert isinstance(store.state("b1", ""), BatchState)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        Store(tmp_path / "nowhere" / "queue.sqlite")
    (tmp_path / "garbage").write_bytes(b"no database" * 1000)
    with pytest.raises(ConfigError, match="garbage"):
        Store(tmp_path / "garbage")
