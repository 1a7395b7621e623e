"""`skerry deploy --target ssh` with real sshd, real wheels and real processes: two hosts from
nothing, a changed topology and a new release under streams, and what fails is put back."""

from __future__ import annotations

import datetime
import os
import signal
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from msgspec.structs import replace
from typer.testing import CliRunner

from core.config import EdgeTls, Topology, load
from core.config_tenants import Tenant
from core.errors import ConfigError
from core.keys import append_new, new_key
from deploy import certs
from deploy.commands import app
from deploy.ssh.run import Ask, deploy_over_ssh
from deploy.ssh.stage import SshStage
from tests.deploy.ssh.machines import Machine, machines
from tests.deploy.ssh.world import topology, written
from tests.world.callers import Callers
from tests.world.faults import until
from tests.world.scripted import ask, completion

pytestmark = pytest.mark.world

UNITS = {"nyc": "alpha", "eu-prefill": "alpha", "eu": "beta", "eu-decode": "beta"}


@dataclass
class Far:
    """The world of these tests. `given` is the topology that it was deployed with last."""

    folder: Path
    machines: dict[str, Machine]
    given: Topology
    wheels: Path
    said: list[str] = field(default_factory=list)

    @property
    def edges(self) -> Mapping[str, str]:
        return {edge.name: f"http://{edge.listen}" for edge in self.given.edges}

    def deploy(self, unit: str, changed: Topology | None = None, **more: object) -> list[str]:
        """What is said. Raises ConfigError."""
        given = changed or self.given
        world = load(written(self.folder, given), state=self.folder / "state")
        certs.init(world, 2, lambda _: None)
        wheelhouse = more.pop("wheelhouse", self.wheels)
        assert isinstance(wheelhouse, Path)
        ask = Ask(unit, wheelhouse, idle_s=60, ready_s=60, **more)  # type: ignore[arg-type]
        start = len(self.said)
        deploy_over_ssh(world, ask, self.folder / "cache", self.said.append)
        self.given = given
        return self.said[start:]

    def pids(self) -> dict[str, int]:
        """Of what systemd watches."""
        return {
            name: self.machines[host].main_pid(f"skerry-far-{name}.service")
            for name, host in UNITS.items()
        }

    def unit(self, name: str) -> str:
        path = self.machines[UNITS[name]].units / f"skerry-far-{name}.service"
        return path.read_text(encoding="utf-8")

    def edge_pid(self) -> int:
        answer = httpx.get(f"{self.edges['nyc']}/status", trust_env=False, timeout=30)
        return int(answer.json()["workers"][0]["pid"])


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> Iterator[Far]:
    """Deployed from nothing."""
    with two_hosts(tmp_path_factory.mktemp("far"), wheels) as far:
        yield far


@contextmanager
def two_hosts(folder: Path, wheels: Path, **edge: object) -> Iterator[Far]:
    """`edge`: what is different of its edge."""
    with machines(folder, ["alpha", "beta"]) as (ssh_config, hosts):
        given = topology(folder, ssh_config)
        given = replace(given, edges=(replace(given.edges[0], **edge),))
        far = Far(folder, hosts, given, wheels)
        far.deploy("eu", upload_models=True)
        far.deploy("nyc")
        yield far


def tampered(wheels: Path, folder: Path, file: str, line: str) -> Path:
    """A wheelhouse with a release in which `file` ends with `line`."""
    (source,) = wheels.glob("skerry-*.whl")
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(folder / source.name, "w") as new:
        for one in old.infolist():
            data = old.read(one)
            new.writestr(one, data + f"\n{line}\n".encode() if one.filename == file else data)
    return folder


def test_two_hosts_answer_and_a_second_deploy_finds_nothing_to_do(far: Far) -> None:
    answer = ask(far.edges["nyc"], completion("A lamp is lit.", max_tokens=12))
    assert answer.done
    assert len(answer.text) >= 12
    assert "A lamp is lit.".startswith(answer.text)
    pids = far.pids()
    assert all(pids.values())
    assert far.deploy("eu")[-1] == "nothing to do: eu runs this already"
    assert far.deploy("nyc")[-1] == "nothing to do: nyc runs this already"
    assert far.pids() == pids


def test_secrets_lie_on_the_hosts_that_need_them_readable_by_their_user_alone(far: Far) -> None:
    mine = (far.folder / "state" / "region.secret").read_text(encoding="ascii")
    for machine, names in (
        ("alpha", {"region.secret", "fleet.secret"}),
        ("beta", {"region.secret"}),
    ):
        state = far.machines[machine].home / "skerry" / "far" / "state"
        files = {path.name: path for path in state.glob("*.secret")}
        assert files.keys() == names
        assert {path.stat().st_mode & 0o777 for path in files.values()} == {0o600}
        assert files["region.secret"].read_text(encoding="ascii") == mine
    assert mine not in "".join(far.unit(name) for name in UNITS)


def test_a_dry_run_shows_units_and_steps_and_changes_nothing(far: Far) -> None:
    before = {name: far.unit(name) for name in UNITS}
    files = sorted(far.folder.joinpath("beta").rglob("*"))
    said = "\n".join(far.deploy("eu", dry_run=True, again=True))
    assert "write beta:" in said
    assert "ExecStart=" in said
    assert "systemctl --user restart skerry-far-eu-decode.service" in said
    assert "drain region eu" in said
    assert {name: far.unit(name) for name in UNITS} == before
    assert sorted(far.folder.joinpath("beta").rglob("*")) == files


def test_edge_and_region_are_replaced_under_streams_and_nobody_fails(
    far: Far, tmp_path: Path
) -> None:
    """The edge by a new release; the region by a topology that changes a node, and has another one,
    which goes again afterwards."""
    release = tampered(far.wheels, tmp_path, "core/release.py", "# another one")
    pids, edge, region = far.pids(), far.edge_pid(), far.given.regions[0]
    prefill, decode = region.nodes
    nodes = (prefill, replace(decode, max_sequences=16))
    less = replace(
        far.given,
        tenants={"harbour": Tenant()},
        regions=(replace(region, nodes=nodes),),
    )
    another = replace(decode, name="eu-decode-2", ssh="alpha")
    more = replace(less, regions=(replace(region, nodes=(*nodes, another)),))
    service = "skerry-far-eu-decode-2.service"
    with Callers(far, 4, tokens=20) as callers:
        assert until(lambda: len(callers.answers) >= 4)
        far.deploy("nyc", more, wheelhouse=release)
        far.deploy("eu")
        so_far = len(callers.answers)
        assert until(lambda: len(callers.answers) >= so_far + 4)
    callers.check()
    after = far.pids()
    assert after["nyc"] == pids["nyc"]  # the holder of its socket
    assert far.edge_pid() != edge
    assert after["eu-decode"] != pids["eu-decode"]
    assert (after["eu"], after["eu-prefill"]) == (pids["eu"], pids["eu-prefill"])
    assert "max_sequences = 16" in _topology_of(far.unit("eu-decode"))
    assert far.machines["alpha"].active(service)
    far.deploy("eu", less)
    assert not (far.machines["alpha"].units / service).exists()
    assert not far.machines["alpha"].active(service)
    assert far.pids() == after
    assert far.deploy("nyc", wheelhouse=release)[-1] == "nothing to do: nyc runs this already"


@pytest.fixture(scope="module")
def broken(far: Far, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release that installs well, and whose nodes and edges end at once."""
    once, twice = tmp_path_factory.mktemp("once"), tmp_path_factory.mktemp("twice")
    tampered(far.wheels, once, "regional/node/app.py", _FAILS.format("run_node"))
    return tampered(once, twice, "edge/serving.py", _FAILS.format("run_edge"))


def test_a_region_that_does_not_come_up_is_put_back(far: Far, broken: Path) -> None:
    before = {name: far.unit(name) for name in UNITS}
    with Callers(far, 3, tokens=20) as callers, pytest.raises(ConfigError) as failed:
        far.deploy("eu", wheelhouse=broken)
    callers.check()
    message = str(failed.value)
    assert "alpha: node eu-prefill ended while starting" in message
    assert "no lamp oil" in message
    assert message.endswith("the world is as it was")
    assert {name: far.unit(name) for name in UNITS} == before
    assert not list(far.machines["alpha"].home.glob("skerry/far/changing/*"))
    assert far.deploy("eu")[-1] == "nothing to do: eu runs this already"


def test_an_edge_that_does_not_come_up_leaves_the_first_one(far: Far, broken: Path) -> None:
    before, edge = far.unit("nyc"), far.edge_pid()
    with Callers(far, 3, tokens=20) as callers, pytest.raises(ConfigError) as failed:
        far.deploy("nyc", wheelhouse=broken)
    callers.check()
    assert "no lamp oil" in str(failed.value)
    assert str(failed.value).startswith("alpha: ")
    assert (far.unit("nyc"), far.edge_pid()) == (before, edge)


def test_a_host_that_is_lost_midway_is_named_and_put_back_by_a_new_connection(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    """alpha's connections are cut as its edge is to be replaced."""
    before = far.unit("nyc")
    put = SshStage._put

    def cut(stage: SshStage, name: str, *, back: bool) -> bool:
        found = put(stage, name, back=back)
        if not back:
            for pid in _children(far.machines["alpha"].process.pid):
                os.kill(pid, signal.SIGKILL)
        return found

    monkeypatch.setattr(SshStage, "_put", cut)
    with pytest.raises(ConfigError, match="alpha: the connection ended") as failed:
        far.deploy("nyc", replace(far.given, currency="EUR"))
    monkeypatch.undo()
    assert str(failed.value).endswith("the world is as it was")
    assert far.unit("nyc") == before
    answer = ask(far.edges["nyc"], completion("Still here?", max_tokens=6))
    assert answer.done
    assert "Still here?".startswith(answer.text)


def test_what_a_deploy_that_was_cut_off_had_drained_works_again_with_the_next(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C twice, or a machine that went to sleep, while a node is drained."""

    def cut(*_: object, **__: object) -> bool:
        raise KeyboardInterrupt

    def resting() -> bool:
        page = httpx.get(f"{far.edges['nyc']}/status", trust_env=False, timeout=30).json()
        (region,) = page["regions"]
        (node,) = (one for one in region["status"]["nodes"] if one["name"] == "eu-prefill")
        return bool(node["draining"])

    monkeypatch.setattr(SshStage, "_put", cut)
    with pytest.raises(KeyboardInterrupt):
        far.deploy("eu", again=True)
    monkeypatch.undo()
    assert until(resting)
    said = far.deploy("eu")
    assert "an earlier deploy was cut off: what it had ordered of router eu is undone" in said
    assert said[-1] == "nothing to do: eu runs this already"
    assert until(lambda: not resting())
    assert not [line for line in far.deploy("eu") if "cut off" in line]


def test_a_wheel_that_arrives_damaged_changes_nothing(far: Far, tmp_path: Path) -> None:
    release = tampered(far.wheels, tmp_path, "core/release.py", "# damaged")
    before, pids = {name: far.unit(name) for name in UNITS}, far.pids()

    def damaged(path: Path) -> str:
        return "0" * 64 if path.suffix == ".whl" else "1" * 64

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("deploy.ssh.wheels.sha256_of", damaged)
        with pytest.raises(ConfigError, match=r"(alpha|beta): .*did not arrive as it was sent"):
            far.deploy("eu", wheelhouse=release)
    assert ({name: far.unit(name) for name in UNITS}, far.pids()) == (before, pids)


def test_one_deploy_at_a_time_on_a_host(far: Far) -> None:
    from core.config import Ssh
    from deploy.ssh.channel import Host

    config = Path(far.given.ssh.config or "")
    other = Host("beta", Ssh(folder="skerry", manager="user"), config, [])
    try:
        assert other.lock(f"{other.facts.folder}/lock", "somebody else") is None
        with pytest.raises(ConfigError, match=r"beta: another deploy is under way.*somebody else"):
            far.deploy("eu", again=True)
    finally:
        other.close()


def test_keys_that_are_made_here_are_good_there_by_the_command_itself(far: Far) -> None:
    """At last, since from then on callers need one."""
    key, record = new_key("harbour", now=0)
    append_new(far.folder / "state" / "keys.jsonl", [record])
    words = ["deploy", "nyc", "--target", "ssh", "--topology", str(far.folder / "far.toml")]
    words += ["--state", str(far.folder / "state"), "--wheelhouse", str(far.wheels)]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0
    assert done.stdout.endswith("\nnyc runs on alpha\n")
    url = f"{far.edges['nyc']}/v1/models"
    known = {"authorization": f"Bearer {key}"}
    assert until(
        lambda: httpx.get(url, headers=known, trust_env=False, timeout=30).status_code == 200
    )
    assert until(lambda: httpx.get(url, trust_env=False, timeout=30).status_code == 401)


@pytest.mark.soak
def test_a_crew_that_speaks_https_is_replaced_beside_itself(
    tmp_path: Path, wheels: Path, own_certificate: tuple[bytes, bytes]
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    for name, pem in zip(("public.crt", "public.key"), own_certificate, strict=True):
        (state / name).write_bytes(pem)
    tls = EdgeTls("public.crt", "public.key")
    with two_hosts(tmp_path, wheels, workers=2, tls=tls) as far:
        url = far.given.edges[0].url

        def workers() -> set[int]:
            answer = httpx.get(f"{url}/status", verify=False, trust_env=False)
            return {int(one["pid"]) for one in answer.json()["workers"]}

        before = workers()
        far.deploy("nyc", again=True)
        assert until(lambda: len(workers()) == 2 and not workers() & before)


@pytest.fixture
def own_certificate() -> tuple[bytes, bytes]:
    """Certificate and key, its own authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "skerry.example")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=30))
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return certificate.public_bytes(pem), key.private_bytes(pem, form, plain)


_FAILS = """
def {}(*_: object) -> int:
    raise SystemExit("no lamp oil")
"""


def _topology_of(unit: str) -> str:
    (line,) = (line for line in unit.splitlines() if line.startswith("Topology="))
    return Path(line.removeprefix("Topology=")).read_text(encoding="utf-8")


def _children(pid: int) -> list[int]:
    import psutil

    return [one.pid for one in psutil.Process(pid).children(recursive=False)]
