"""Supervision with real processes: restart, back-off, an end that leaves nothing, no orphans."""

import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.fleet import EDGE_GRACE_S, GRACE_S, HURRY_S, TELL_S, running
from deploy.process import Pauses, Process, Spec, describe_exit
from tests.conftest import Spawn
from tests.deploy.waiting import is_gone, until

QUICK = Pauses(first_s=0.01, most_s=0.02)
ROOT = Path(__file__).parents[2]


def read_pid(path: Path) -> int:
    return int(path.read_text(encoding="ascii")) if path.exists() else 0


class Lines:
    """A `say` that remembers."""

    def __init__(self) -> None:
        self.all: list[str] = []

    def __call__(self, line: str) -> None:
        self.all.append(line)


@pytest.fixture
def said() -> Lines:
    return Lines()


def spec(name: str, folder: Path, *arguments: str, kind: str = "node") -> Spec:
    return Spec(name, kind, "tests.deploy.stubs", arguments, {}, folder / f"{name}.log")


@pytest.fixture
def one_live(tmp_path: Path, said: Lines) -> Iterator[tuple[Process, Path]]:
    path = tmp_path / "pid"
    with running([spec("one", tmp_path, "live", str(path))], say=said, pauses=QUICK) as processes:
        until(lambda: read_pid(path))
        yield processes["one"], path


def test_leaving_the_block_ends_process_and_grandchild(tmp_path: Path, said: Lines) -> None:
    path = tmp_path / "pid"
    with running([spec("one", tmp_path, "live", str(path))], say=said) as processes:
        pid = until(lambda: read_pid(path))
        child = read_pid(tmp_path / "pid.child")
        assert pid == processes["one"].pid
    assert processes["one"].exit_code == 0
    assert is_gone(pid)
    until(lambda: is_gone(child))


def test_a_failure_inside_the_block_ends_everything(tmp_path: Path, said: Lines) -> None:
    path = tmp_path / "pid"
    pids: list[int] = []

    def fail_inside() -> None:
        with running([spec("one", tmp_path, "live", str(path))], say=said):
            pids.append(until(lambda: read_pid(path)))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_inside()
    assert [is_gone(pid) for pid in pids] == [True]


def test_a_process_deaf_to_sigterm_is_killed_after_the_grace(
    tmp_path: Path, said: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.fleet.GRACE_S", 0.2)
    monkeypatch.setattr("deploy.fleet.HURRY_S", 0.2)
    path = tmp_path / "pid"
    with running([spec("one", tmp_path, "stubborn", str(path))], say=said) as processes:
        pid = until(lambda: read_pid(path))
    assert is_gone(pid)
    assert processes["one"].exit_code == -signal.SIGKILL


def test_edges_end_first_and_the_late_are_asked_a_second_time(
    tmp_path: Path, said: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An edge that still answers hears from its router that it ends, before it is hurried."""
    monkeypatch.setattr("deploy.fleet.EDGE_GRACE_S", 0.2)
    monkeypatch.setattr("deploy.fleet.HURRY_S", 5.0)
    specs = [
        spec(kind, tmp_path, "patient", str(tmp_path / kind), kind=kind)
        for kind in ("router", "edge")
    ]
    monkeypatch.setattr("deploy.fleet.TELL_S", 0.5)
    asked: list[str] = []
    ask_to_end = Process.ask_to_end

    def ask(process: Process) -> None:
        asked.append(process.spec.name)
        ask_to_end(process)

    monkeypatch.setattr(Process, "ask_to_end", ask)
    with running(specs, say=said) as processes:
        until(lambda: all(read_pid(tmp_path / kind) for kind in processes))
    assert asked[:3] == ["edge", "router", "router"]
    assert sorted(asked[3:]) == ["edge", "router"], "in the end all are, who has ended or not"
    assert [process.exit_code for process in processes.values()] == [0, 0]


def test_the_end_of_a_world_is_bounded() -> None:
    assert EDGE_GRACE_S + GRACE_S + TELL_S + HURRY_S <= 12


def test_a_killed_process_is_started_again_and_said(
    one_live: tuple[Process, Path], said: Lines
) -> None:
    process, path = one_live
    process.revive = True
    first, child = process.pid, read_pid(path.with_name("pid.child"))
    process.kill()
    second = until(lambda: (pid := read_pid(path)) != first and pid)
    assert second == process.pid
    assert said.all == ["one ended (killed by SIGKILL), starting again in 0.0 s"]
    until(lambda: is_gone(child))  # what the dead one had started was swept away


def test_without_revive_a_dead_process_stays_dead(
    one_live: tuple[Process, Path], said: Lines
) -> None:
    process, _ = one_live
    process.kill()
    assert until(lambda: process.exit_code) == -signal.SIGKILL
    assert said.all == []


def test_an_early_end_keeps_code_and_last_words(tmp_path: Path, said: Lines) -> None:
    with running([spec("one", tmp_path, "die", "7", "no memory")], say=said) as processes:
        assert until(lambda: processes["one"].exit_code) == 7
        assert processes["one"].last_lines() == ["no memory"]


def test_a_configuration_error_is_not_tried_again(
    one_live: tuple[Process, Path], said: Lines
) -> None:
    process, _ = one_live
    process.revive = True
    process.kill(signal.SIGUSR1)
    assert until(lambda: process.exit_code) == 2
    assert until(lambda: said.all) == ["one refused to start: unknown key"]


def test_two_that_write_to_one_log_lose_no_line(one_live: tuple[Process, Path]) -> None:
    """An edge that takes another's place writes to its log beside it."""
    process, _ = one_live
    with process.spec.log.open("a", encoding="ascii") as log:
        log.write("the last words of another\n")
    process.kill(signal.SIGUSR1)
    until(lambda: "unknown key" in process.last_lines())
    assert "the last words of another" in process.last_lines()


def test_pauses_grow_until_a_process_has_settled() -> None:
    pauses = Pauses(first_s=1, most_s=5, settled_s=30)
    seen, pause = [], 0.0
    for lived in (0, 0, 0, 0, 0, 31, 0):
        pause = pauses.after(pause, lived)
        seen.append(pause)
    assert seen == [1, 2, 4, 5, 5, 1, 2]


@pytest.mark.parametrize(
    ("code", "text"),
    [(3, "exit code 3"), (-9, "killed by SIGKILL"), (-250, "killed by signal 250")],
)
def test_describe_exit(code: int, text: str) -> None:
    assert describe_exit(code) == text


@pytest.mark.parametrize("how", ["live", "stubborn"])
def test_a_killed_launcher_leaves_no_process(tmp_path: Path, spawn: Spawn, how: str) -> None:
    """SIGKILL gives a launcher no chance to clean up: the children notice by themselves."""
    launcher = tmp_path / "launcher.py"
    launcher.write_text(
        textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from deploy.fleet import running
        from deploy.process import Spec
        here = Path({str(tmp_path)!r})
        def one(name):
            return Spec(name, "node", "tests.deploy.stubs", ({how!r}, str(here / name)),
                        {{}}, here / (name + ".log"))
        with running([one("a"), one("b")], say=print):
            time.sleep(600)
        """),
        encoding="utf-8",
    )
    process = spawn([sys.executable, str(launcher)], cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    paths = [tmp_path / name for name in ("a", "b", "a.child", "b.child")]
    until(lambda: all(read_pid(path) for path in paths))
    pids = [read_pid(path) for path in paths]
    process.kill()
    assert until(lambda: all(is_gone(pid) for pid in pids))
