"""`skerry models`, as the command line declares it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.where import AnyStateOption

if TYPE_CHECKING:  # `skerry --help` reads this file and must be quick
    from deploy.rollout.messages import AddModel

models = typer.Typer(name="models", help="The models that regions serve.", no_args_is_help=True)
DRAW_S = 0.2
SourceOption = Annotated[
    str,
    typer.Option(help="A GGUF file, a folder of safetensors, or package:NAME.", show_default=False),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Print what would be done, and change nothing.")
]
WaitOption = Annotated[float, typer.Option(min=1, help="Seconds to wait for what runs to end.")]


@models.command("list")
def list_models(
    edge: Annotated[
        str | None,
        typer.Option("--edge", help="URL of an edge; by default that of the running world."),
    ] = None,
) -> None:
    """Show where each model is warm or cold, and how many nodes it has and should have."""
    from deploy.served import model_lines
    from deploy.state import edges_of_first
    from deploy.status import first_view

    _, view = first_view([edge] if edge else edges_of_first())
    print("\n".join(model_lines(view.regions)))


@models.command("digest")
def digest(source: Annotated[str, typer.Argument(help="As for `models add --source`.")]) -> None:
    """Print the digest of a model's files, as `models add --digest` and a topology's `digest` want
    it."""
    from core.models.source import resolve_source

    print(_digest(resolve_source(source)))


@models.command("add")
def add(
    name: Annotated[str, typer.Argument(help="What requests call it.", show_default=False)],
    source: SourceOption,
    digest: Annotated[
        str | None, typer.Option(help="sha256:HEX that the files must have.", show_default=False)
    ] = None,
    alias: Annotated[
        list[str] | None, typer.Option("--alias", help="Another name; may be repeated.")
    ] = None,
    region: Annotated[
        list[str] | None,
        typer.Option("--region", help="Serve it here; may be repeated. All by default."),
    ] = None,
    split: Annotated[
        bool, typer.Option("--split", help="A prefill and a decode node instead of a combined one.")
    ] = False,
    on_demand: Annotated[
        bool, typer.Option("--on-demand", help="Start its nodes when somebody asks for it.")
    ] = False,
    pool: Annotated[
        str, typer.Option(help="Share the places of this pool of the region's; implies on demand.")
    ] = "",
    like: Annotated[
        str, typer.Option(help="A node whose settings it has; else the first that decodes.")
    ] = "",
    gpus: Annotated[
        str, typer.Option(help="CUDA devices, such as 2,3, where nodes run on GPUs.")
    ] = "",
    kv_tokens: Annotated[
        int, typer.Option(min=0, help="Size of the KV pool; 0 is that of the node it is like.")
    ] = 0,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompt and answer together.")
    ] = None,
    engine: Annotated[str, typer.Option(help="torch, or scripted for rehearsals.")] = "torch",
    ready_within: Annotated[
        float, typer.Option(min=1, help="Seconds that its nodes may take to start.")
    ] = 600.0,
    dry_run: DryRunOption = False,
    state: AnyStateOption = None,
) -> None:
    """Serve one more model in the running world; no request fails for it.

    Its files are read once for their digest. Its nodes start, routers take it in while they run,
    and each edge is replaced beside itself. What does not come up is taken back.
    """
    from core.errors import ConfigError
    from core.models.source import resolve_source
    from core.types import Role
    from deploy.rollout.messages import AddModel
    from deploy.rollout.running import asked

    path = resolve_source(source)
    found = _digest(path)
    if digest is not None and digest.removeprefix("sha256:") != found.removeprefix("sha256:"):
        raise ConfigError(f"{path} is not what you want: its digest is {found}")
    if engine not in ("torch", "scripted"):
        raise ConfigError(f"engine {engine!r}: torch, or scripted")
    what = AddModel(
        name=name,
        source=source if source.startswith("package:") else str(path.resolve()),
        digest=found,
        aliases=tuple(alias or ()),
        context=context,
        engine="scripted" if engine == "scripted" else "torch",
        regions=tuple(region or ()),
        roles=(Role.PREFILL, Role.DECODE) if split else (Role.COMBINED,),
        like=like,
        pool=pool,
        gpus=_devices(gpus),
        kv_tokens=kv_tokens,
        on_demand=on_demand,
        dry_run=dry_run,
        ready_s=ready_within,
    )
    for line in asked(what, state):
        print(line, flush=True)
    if not dry_run:
        print(_to_keep(what, state))


@models.command("remove")
def remove(
    name: Annotated[str, typer.Argument(help="A model or alias.", show_default=False)],
    wait: WaitOption = 600.0,
    dry_run: DryRunOption = False,
    state: AnyStateOption = None,
) -> None:
    """Serve a model no more: edges refuse it, its nodes end what they have and stop."""
    from deploy.rollout.messages import RemoveModel
    from deploy.rollout.running import asked

    for line in asked(RemoveModel(name=name, dry_run=dry_run, idle_s=wait), state):
        print(line, flush=True)


def _digest(path: Path) -> str:
    """With progress on stderr where that is a terminal."""
    from deploy.digests import digest_of

    live, drawn = sys.stderr.isatty(), 0.0

    def step(done: int, total: int) -> None:
        nonlocal drawn
        now = time.monotonic()
        if live and (now - drawn >= DRAW_S or done == total):
            drawn = now
            sys.stderr.write(f"\r\x1b[K  reading {path.name}: {done / max(1, total):.0%}")
            sys.stderr.flush()

    found = digest_of(path, step)
    if live:
        sys.stderr.write("\r\x1b[K")
    return found


def _devices(given: str) -> tuple[int, ...]:
    from core.errors import ConfigError

    try:
        return tuple(int(one) for one in given.split(",") if one.strip())
    except ValueError:
        raise ConfigError(f"--gpus {given!r}: numbers of CUDA devices, such as 2,3") from None


def _to_keep(what: AddModel, state: Path | None) -> str:
    """What a topology file has to have for the model to be there after the next start."""
    from core.config import load
    from deploy.rollout.running import topology_of
    from deploy.toml_write import fragment

    topology = load(topology_of(state), state=state or Path()).topology
    lines = ["\nTo keep it beyond the next start, write into the topology's file:\n"]
    lines += fragment(("models", what.name), topology.models[what.name])
    for region in topology.regions:
        nodes = [node for node in region.nodes if node.model == what.name]
        if nodes:
            lines.append(f"\n# in region {region.name}")
        for node in nodes:
            lines += ["[[regions.nodes]]", *fragment((), node), ""]
        if what.name in region.scale:
            lines += fragment(("regions", "scale", what.name), region.scale[what.name])
    return "\n".join(lines)
