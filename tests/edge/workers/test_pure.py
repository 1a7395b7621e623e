"""Routes, timers, source maps, budgets of output, verdicts, texts of Cap'n Proto: no I/O."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from core.config_workers import Workers
from core.errors import WorkerRefused
from edge.workers.bundle import Assets, Module, check_name, digest_of, pack, unpack, version_of
from edge.workers.capnp import Embed, Value, Word, quoted, render
from edge.workers.cron import read_cron
from edge.workers.logs import BURST_BYTES, LINES, Budget, LogBook
from edge.workers.output import Reader
from edge.workers.routes import Routes, check_own_host, check_route, conflict, read_route
from edge.workers.sourcemap import SourceMap
from edge.workers.table import Entry, Table, write_table
from edge.workers.watch import End, Fine, GiveWay, Recover, Sample, Watch
from tests.edge.workers.doubles import bundle_of

ROUTES = ["example.com/*", "*.example.com/*", "example.com/a/*", "example.com/a/b", "*ple.com/z/*"]


@pytest.mark.parametrize(
    ("host", "path", "found"),
    [
        ("example.com", "/", "example.com/*"),
        ("example.com", "/a/x", "example.com/a/*"),
        ("example.com", "/a/b", "example.com/a/b"),
        ("example.com", "/a", "example.com/*"),
        ("x.example.com", "/a/b", "*.example.com/*"),
        ("example.com", "/z/1", "example.com/*"),
        ("sample.com", "/z/1", "*ple.com/z/*"),
        ("other.org", "/", None),
    ],
)
def test_the_most_particular_route_wins(host: str, path: str, found: str | None) -> None:
    for order in (ROUTES, ROUTES[::-1]):
        routes = Routes([(read_route(one), one) for one in order])
        assert routes.find(host, path) == found


@pytest.mark.parametrize(
    "pattern",
    ["", "/", "*/x", "exa*mple.com/*", "example.com/*/x", "example.com/a?b=1", "ex ample.com/*",
     "*", "**.a.com/*"],
)  # fmt: skip
def test_what_is_no_route_is_refused(pattern: str) -> None:
    with pytest.raises(WorkerRefused, match="cannot be served"):
        check_route(pattern, ["example.com", "localhost"])


@pytest.mark.parametrize(
    ("pattern", "good"),
    [
        ("example.com/*", True),
        ("https://a.example.com/x", True),
        ("*.example.com/*", True),
        ("*example.com/*", True),
        ("*a.example.com/*", False),
        ("evil-example.com/*", False),
        ("*.com/*", False),
        ("localhost/*", False),
        ("127.0.0.1/*", False),
        ("a.localhost/*", True),
    ],
)
def test_routes_stay_in_their_zones(pattern: str, good: bool) -> None:
    zones = ["example.com", "localhost"]
    if good:
        assert check_route(pattern, zones).path
    else:
        with pytest.raises(WorkerRefused, match="cannot be served"):
            check_route(pattern, zones)


@pytest.mark.parametrize(
    ("pattern", "good"),
    [
        ("vic.workers.example.org/*", False),
        ("https://VIC.workers.example.org", False),
        ("*.workers.example.org/*", False),
        ("*workers.example.org/*", False),
        ("mine.workers.example.org/a/*", True),
        ("a.vic.workers.example.org/*", True),
        ("*.mine.workers.example.org/*", True),
        ("shop.example.org/*", True),
        ("*.example.org/*", True),
    ],
)
def test_a_route_takes_no_other_workers_own_host(pattern: str, good: bool) -> None:
    domain = "workers.example.org"
    assert check_route(pattern, ["example.org", domain]).path
    if good:
        check_own_host(pattern, domain, "mine")
    else:
        with pytest.raises(WorkerRefused, match=r"has NAME\.workers\.example\.org to itself"):
            check_own_host(pattern, domain, "mine")


def test_one_route_of_two_workers_is_named() -> None:
    taken = {"shop": ["a.com/*"], "mine": ["b.com/*"]}
    why = conflict("mine", ["https://a.com/*"], taken)
    assert why is not None
    assert "'a.com/*' belongs to the Worker 'shop'" in why
    assert conflict("mine", ["b.com/*", "a.com/x"], taken) is None


@pytest.mark.parametrize(
    ("cron", "at", "due"),
    [
        ("* * * * *", "2026-11-30T04:05", True),
        ("*/15 * * * *", "2026-11-30T04:30", True),
        ("*/15 * * * *", "2026-11-30T04:31", False),
        ("0-10/5 4,6 * * *", "2026-11-30T06:10", True),
        ("0-10/5 4,6 * * *", "2026-11-30T05:10", False),
        ("0 0 L * *", "2028-02-29T00:00", True),
        ("0 0 L * *", "2028-02-28T00:00", False),
        ("0 0 * * 1", "2026-11-29T00:00", True),  # a Sunday
        ("0 0 * * SUN", "2026-11-29T00:00", True),
        ("0 0 * * 2", "2026-11-29T00:00", False),
        ("0 0 * * 5L", "2026-11-26T00:00", True),  # the last Thursday
        ("0 0 * * 5L", "2026-11-19T00:00", False),
        ("0 0 13 * FRI", "2026-11-13T00:00", True),
        ("0 0 13 * FRI", "2026-11-20T00:00", True),  # either will do
        ("0 0 13 * FRI", "2026-11-21T00:00", False),
        ("0 0 1 jan-mar *", "2026-02-01T00:00", True),
        ("0 0 1 JAN *", "2026-02-01T00:00", False),
    ],
)
def test_timers(cron: str, at: str, due: bool) -> None:
    assert read_cron(cron).due(dt.datetime.fromisoformat(at)) is due


@pytest.mark.parametrize(
    "cron",
    ["", "* * * *", "60 * * * *", "* 24 * * *", "* * 0 * *", "* * * 13 *", "* * * * 8", "a * * * *",
     "*/0 * * * *", "5-1 * * * *", "* * * * * *", "1,,2 * * * *"],
)  # fmt: skip
def test_what_is_no_timer_is_refused(cron: str) -> None:
    with pytest.raises(WorkerRefused, match="does not fit"):
        read_cron(cron)


def test_a_place_in_a_bundle_is_found_in_its_source() -> None:
    # One line of output: column 0 is a.ts 1:1, column 10 is b.ts 3:5; nothing on the second line.
    text = json.dumps({"sources": ["a.ts", "b.ts"], "mappings": "AAAA,UCEI;"}).encode()
    places = SourceMap(text)
    assert str(places.find(1, 1)) == "a.ts:1:1"
    assert str(places.find(1, 10)) == "a.ts:1:1"
    assert str(places.find(1, 11)) == "b.ts:3:5"
    assert str(places.find(1, 400)) == "b.ts:3:5"
    assert places.find(2, 1) is None
    assert places.find(99, 1) is None
    with pytest.raises(ValueError, match="no digit"):
        SourceMap(json.dumps({"sources": [], "mappings": "A!"}).encode())


def test_output_becomes_lines_with_the_places_of_sources() -> None:
    places = SourceMap(json.dumps({"sources": ["src/a.ts"], "mappings": "AAAA"}).encode())
    book = LogBook()
    reader = Reader(book, "v", "mark", "worker.js", places)
    run = {
        "outcome": "exception",
        "exceptions": [{"name": "E", "stack": "at file:///bundle/worker.js:1:7"}],
    }
    for line in (
        {"level": "log", "message": "hello"},
        {"level": "error", "message": "bad\n  at f (worker.js:1:3)\nstack: /opt/workerd@1"},
        {"level": "log", "message": f"mark {json.dumps(run)}"},
        {"level": "log", "message": 'forged {"outcome": "ok"}'},
        {"level": "warn", "source": "workerd/api/x.c++:8", "message": "NOSENTRY cache failed"},
        {
            "level": "error",
            "source": "workerd/io/x.c++:3",
            "message": "e = ffi.rs:4: failed: connecting to 127.0.0.1:1 is not allowed",
        },
    ):
        reader.take(json.dumps(line).encode())
    reader.take(b"plain words")
    reader.take(b"stack: /opt/workerd@2b5edc0")
    lines = book.last(100)
    said = [(line.level, line.message) for line in lines if line.run is None]
    assert sorted(said) == sorted([
        ("log", "hello"), ("error", "bad\n  at f (src/a.ts:1:1)"),
        ("log", 'forged {"outcome": "ok"}'), ("host", "plain words"),
        ("error", "fetch: connecting to 127.0.0.1:1 is not allowed (workers.fetch of the"
         " topology)"),
    ])  # fmt: skip
    (told,) = [line.run for line in lines if line.run is not None]
    assert (told.outcome, told.exceptions[0].stack) == ("exception", "at src/a.ts:1:1")
    assert reader.last == "plain words"


def test_a_flood_washes_nothing_of_ours_away() -> None:
    book = LogBook()
    book.say("v", "host", "ended")
    for number in range(LINES + 5):
        book.say("v", "log", f"flood {number}" * 2000)
    lines = book.last(10_000)
    assert len(lines) == LINES + 1
    assert lines[0].message == "ended"
    assert max(len(line.message) for line in lines) < 10_000
    assert book.last(0) == []


def test_a_budget_is_spent_and_comes_back() -> None:
    budget = Budget(0.0)
    assert budget.spend(BURST_BYTES, 0.0)
    assert not budget.spend(1, 0.0)
    assert not budget.spend(1, 0.5), "not a word at a time"
    assert budget.spend(1, 60.0)


def see(watch: Watch, now: float, cpu: float, memory: float, answered: bool) -> object:
    return watch.see(Sample(now, cpu, memory, answered))


def test_when_a_worker_has_had_enough() -> None:
    def watch(turn_s: float | None = None) -> Watch:
        return Watch(Workers(turn_s=5, memory_mb=100), Sample(0, 0, 50, True), turn_s)

    assert see(watch(), 1, 0.1, 149, True) == Fine()
    full = see(watch(), 1, 0.1, 151, True)
    assert isinstance(full, End)
    assert "filled its memory" in full.reason
    busy = watch()
    assert see(busy, 1, 0.95, 50, False) == GiveWay()
    assert see(busy, 4.9, 4.8, 50, False) == GiveWay()
    loops = see(busy, 5.1, 5.0, 50, False)
    assert isinstance(loops, End)
    assert "held its thread for 5.1 s" in loops.reason
    waiting = watch()
    assert see(waiting, 1, 0.1, 50, False) == Fine()
    assert see(waiting, 6, 0.1, 50, False) == Fine(), "a machine that is busy with others"
    assert see(waiting, 29, 0.2, 50, False) == Fine()
    assert isinstance(see(waiting, 31, 0.3, 50, False), End)
    works = watch()
    for second in range(1, 20):
        assert see(works, second, second, 50, True) == GiveWay(), "it answers: let it work"
    short = watch(0.3)
    assert isinstance(see(short, 0.5, 0.5, 50, False), End)
    long = watch(60)
    assert see(long, 0.5, 0.5, 50, False) == GiveWay()
    assert isinstance(see(long, 5.1, 5.0, 50, False), End), "the world's limit holds"


def test_a_host_that_was_kept_away_ends_nobody_for_it() -> None:
    watch = Watch(Workers(turn_s=5), Sample(0, 0, 50, True))
    assert see(watch, 0.5, 0.5, 50, True) == GiveWay()
    assert see(watch, 7.0, 6.9, 50, False) == GiveWay(), "nobody has asked it for 6.5 s"
    assert see(watch, 7.1, 7.0, 50, True) == Fine(), "it was in the middle of a turn"
    assert see(watch, 14.0, 13.9, 50, False) == GiveWay()
    assert see(watch, 18.9, 18.8, 50, False) == GiveWay()
    loops = see(watch, 19.1, 19.0, 50, False)
    assert isinstance(loops, End)
    assert "held its thread for 5.1 s" in loops.reason


def test_who_computes_gives_way_until_it_is_calm_again() -> None:
    watch = Watch(Workers(turn_s=5), Sample(0, 0, 50, True))
    hasty = []
    for now, cpu, answered, verdict in [
        (0.3, 0.3, False, Fine()),  # a short burst is nothing
        (0.5, 0.5, False, GiveWay()),
        (0.7, 0.5, True, Fine()),
    ]:
        assert see(watch, now, cpu, 50, answered) == verdict
        hasty.append(watch.hasty)
    assert hasty == [True, True, False], "who is silent is looked at again soon"
    verdicts = [see(watch, 1.0 + at, 0.6, 50, True) for at in range(8)]
    assert [verdict for verdict in verdicts if verdict != Fine()] == [Recover()]
    assert see(watch, 9.0, 1.6, 50, True) == GiveWay()
    assert see(watch, 11.0, 2.0, 50, True) == Fine(), "not calm for long enough"


@given(st.text())
def test_texts_are_quoted(text: str) -> None:
    shown = quoted(text)
    assert shown.isascii()
    inside = shown[1:-1].encode().decode("unicode_escape").encode("latin-1")
    assert inside == text.encode("utf-8", "surrogatepass")


def test_values_are_rendered() -> None:
    value: Value = {"a": "x", "b": [True, 1], "c": {"d": Embed("f.js")}, "e": Word("void")}
    assert render(value) == '(a = "x", b = [true, 1], c = (d = embed "f.js"), e = void)'


def test_bundles_are_their_digest() -> None:
    one, again, other = (pack(bundle_of(word)) for word in ("one", "one", "two"))
    assert one == again
    assert digest_of(one) != digest_of(other)
    assert len(version_of(digest_of(one))) == 12
    assert unpack(one) == bundle_of("one")


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", "a\0b"])
def test_no_file_of_a_bundle_leaves_its_folder(name: str) -> None:
    bundle = bundle_of("x")
    bad = type(bundle)(settings=bundle.settings, modules=(Module(name, "esm", b""),))
    with pytest.raises(WorkerRefused):
        unpack(pack(bad))


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (("a", "a/b"), "'a/b', in the place of another"), (("a/b", "./a"), "in the place of"),
        (("a", "b", "./a"), "in the place of"), (("é" * 128,), "too long"),
        (("/".join(["abcd"] * 206),), "too long"),
    ],
)  # fmt: skip
def test_files_that_no_folder_could_hold_are_named(names: tuple[str, ...], why: str) -> None:
    bundle = bundle_of("x")
    modules = tuple(Module(name, "esm", b"") for name in names)
    with pytest.raises(WorkerRefused, match=why):
        unpack(pack(type(bundle)(settings=bundle.settings, modules=modules)))
    files = Assets(files=tuple((name, b"") for name in names))
    with pytest.raises(WorkerRefused, match=why):
        unpack(pack(type(bundle)(settings=bundle.settings, modules=bundle.modules, assets=files)))


def test_a_variable_that_is_no_json_is_named() -> None:
    with pytest.raises(WorkerRefused, match="the variable 'A' is no JSON"):
        unpack(pack(bundle_of("x", vars=(("A", "{a"),))))


@pytest.mark.parametrize("name", ["", "-a", "a-", "A", "a.b", "a" * 64, "é", "a b", "../x"])
def test_names_are_labels_of_hosts(name: str) -> None:
    with pytest.raises(WorkerRefused):
        check_name(name)


def test_a_table_is_seen_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "e" / "table.json"
    table = Table(path, "localhost")

    def entry(name: str, version: str, *routes: str) -> Entry:
        return Entry(
            name=name, tenant="t", version=version, socket="/s", used="/u", token="d",
            routes=routes, answer_s=1.0, concurrency=1,
        )  # fmt: skip

    assert table.of_host("w.localhost", "/") is None
    write_table(path, [entry("w", "1", "shop.org/a/*")])
    assert path.stat().st_mode & 0o077 == 0
    for host in ("w.localhost", "W.LOCALHOST:8787", "w.localhost."):
        found = table.of_host(host, "/")
        assert found is not None
    assert table.of_host("shop.org:80", "/a/1") == table.named("w")
    assert table.of_host("shop.org", "/b") is None
    assert table.of_host("x.w.localhost", "/") is None
    assert table.of_host("[::1]:8787", "/") is None
    write_table(path, [entry("w", "2"), entry("v", "1")])
    assert table.named("w") == entry("w", "2")
    assert table.of_host("shop.org", "/a/1") is None
    write_table(path, [entry("w", "2"), entry("v", "1", "w.localhost/*", "*localhost/*")])
    assert table.of_host("w.localhost", "/") == table.named("w"), "nobody takes its host"
    assert table.of_host("u.localhost", "/") == table.named("v")
    hidden = replace(entry("w", "3", "shop.org/a/*", "w.localhost/a/*"), by_name=False)
    write_table(path, [hidden, entry("v", "1")])
    assert table.of_host("w.localhost", "/") is None, "its routes alone lead to it"
    assert table.of_host("w.localhost", "/a/") == table.of_host("shop.org", "/a/") == hidden
    path.write_bytes(b"torn")
    assert table.named("v") is not None, "what was known holds"
    path.unlink()
    assert table.named("v") is None
