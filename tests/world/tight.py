"""A region whose decode nodes have little memory: answers push each other out of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from core import config
from core.config_tenants import ANONYMOUS, Access, Tenant
from core.types import Role
from deploy import toml_write
from deploy.launcher import LocalWorld, run_world
from deploy.process import Pauses
from tests.tiny_text import write_tiny_folder

MODEL = "tiny"
CONTEXT = 4096


def topology(source: Path, *, kv_tokens: int) -> config.Topology:
    script = config.Scripted(step_ms=1.0, prefill_tokens_per_s=8000.0)
    nodes = tuple(
        config.Node(name=name, role=role, model=MODEL, kv_tokens=tokens, speculate=False)
        for name, role, tokens in (
            ("reader", Role.PREFILL, 4 * CONTEXT),
            ("one", Role.DECODE, kv_tokens),
            ("two", Role.DECODE, kv_tokens),
        )
    )
    return config.Topology(
        version=config.VERSION,
        name="tight",
        models={
            MODEL: config.Model(
                source=str(source), engine="scripted", context=CONTEXT, scripted=script
            )
        },
        edges=(config.Edge(name="edge", listen="127.0.0.1:0"),),
        regions=(config.Region(name="home", nodes=nodes, split_min_tokens=64),),
        access=Access(anonymous="until-keys"),
        tenants={ANONYMOUS: Tenant(tokens_per_minute=1_000_000_000)},  # so that a ledger is kept
        routing=config.Routing(expose_nodes=True),
    )


@contextmanager
def tight_world(folder: Path, *, kv_tokens: int) -> Iterator[LocalWorld]:
    """`kv_tokens`: what each of the two decode nodes holds."""
    described = topology(write_tiny_folder(folder / "tiny", context=CONTEXT), kv_tokens=kv_tokens)
    file = folder / "tight.toml"
    file.write_text(toml_write.dump(described), encoding="utf-8")
    said: list[str] = []
    with run_world(
        file, say=said.append, state=folder / "state", pauses=Pauses(0.1, 0.5, 5.0)
    ) as world:
        yield world
