"""A world of scripted nodes for two hosts, with TLS between its processes: its edge and a prefill
node on alpha, the rest of its region on beta."""

from __future__ import annotations

import socket
import sys
from contextlib import ExitStack
from pathlib import Path

from core import config
from core.config import Topology
from core.config_tenants import Access
from core.types import Role
from deploy import toml_write
from tests.tiny_text import write_tiny_folder

CONTEXT = 4096
MODEL = "tiny"


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 on which nobody listens at this moment, all different."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def topology(folder: Path, ssh_config: Path) -> Topology:
    """The model lies beside the topology file, which no host knows."""
    write_tiny_folder(folder / "tiny", context=CONTEXT)
    edge, http, grpc = (f"127.0.0.1:{port}" for port in free_ports(3))

    def node(name: str, role: Role, ssh: str | None = None) -> config.Node:
        return config.Node(
            name=name, role=role, model=MODEL, kv_tokens=CONTEXT * 2, speculate=False, ssh=ssh
        )

    return Topology(
        version=config.VERSION,
        name="far",
        models={
            MODEL: config.Model(
                source="tiny",
                engine="scripted",
                context=CONTEXT,
                scripted=config.Scripted(step_ms=3.0, prefill_tokens_per_s=4000.0),
            )
        },
        edges=(config.Edge(name="nyc", listen=edge, round_trip_ms={"eu": 1}, ssh="alpha"),),
        regions=(
            config.Region(
                name="eu",
                ssh="beta",
                http=http,
                grpc=grpc,
                nodes=(
                    node("eu-prefill", Role.PREFILL, "alpha"),
                    node("eu-decode", Role.DECODE),
                ),
            ),
        ),
        access=Access(anonymous="until-keys"),
        limits=config.Limits(heartbeat_s=0.3),
        tls=config.Tls(inside=True),
        ssh=config.Ssh(
            folder="skerry",
            python=sys.executable,
            config=str(ssh_config),
            manager="user",
            packages="host",
        ),
    )


def written(folder: Path, given: Topology, name: str = "far.toml") -> Path:
    path = folder / name
    path.write_text(toml_write.dump(given), encoding="utf-8")
    return path
