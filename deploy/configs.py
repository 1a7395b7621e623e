"""`skerry config`: look at topology files without starting anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.where import StateOption, topology_file

config = typer.Typer(help="Look at topology files.", no_args_is_help=True)

FileArgument = Annotated[
    str, typer.Argument(help="A topology file, or the name of a shipped one.", show_default=False)
]


@config.command("check")
def check(file: FileArgument) -> None:
    """Read a topology file and say what it describes, or what is wrong with it."""
    from core.config import load
    from deploy.memory import check_memory
    from deploy.models import check_models

    described = load(topology_file(file), state=Path(".skerry"))
    check_models(described)
    world = described.topology
    nodes = sum(len(region.nodes) for region in world.regions)
    print(
        f"{file}: ok. {len(world.edges)} edges, {len(world.regions)} regions, {nodes} nodes, "
        f"models: {', '.join(world.models)}"
    )
    for warning in check_memory(described):
        print(f"  note: {warning}")


@config.command("diff")
def diff(
    old: Annotated[
        str, typer.Argument(help="A topology file; alone, it is compared with the running world.")
    ],
    new: Annotated[str | None, typer.Argument(help="The one that is to replace it.")] = None,
    state: StateOption = None,
) -> None:
    """Say what differs between two topologies, and what has to be started again for it.

    Exit code 1 when they differ.
    """
    from core.config import load, parse, read
    from deploy.state import running_topology
    from deploy.topology_diff import as_it_would_run, changes, departing, rereads, restarts

    given = load(topology_file(old if new is None else new), state=Path(".skerry"))
    file = running_topology(state) if new is None else topology_file(old)
    before = parse(read(file), name=str(file))
    after = as_it_would_run(given, before) if new is None else given.topology
    found = changes(before, after)
    if not found:
        print("no difference")
        return
    print("\n".join(map(str, found)))
    again = restarts(found, after)
    told = [name for name in rereads(found, after) if name not in again]
    fresh, gone = departing(after, before), departing(before, after)
    again = [name for name in again if name not in fresh]
    print(f"\nto be started again: {', '.join(again) or 'nobody'}")
    if told:
        print(f"to be told while they run: the routers of {', '.join(told)}")
    if fresh:
        print(f"to be started: {', '.join(fresh)}")
    if gone:
        print(f"to be drained and stopped: {', '.join(gone)}")
    raise typer.Exit(1)


@config.command("schema")
def schema() -> None:
    """Print the JSON Schema of topology files, for editors that complete and check TOML."""
    import msgspec

    from core.config import Topology

    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Skerry topology",
        **_with_numbers(msgspec.json.schema(Topology)),
    }
    print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


def _with_numbers(schema: dict[str, Any]) -> dict[str, Any]:
    """Exact decimals are strings in msgspec's schema; a file writes them as numbers."""

    def mended(value: Any) -> Any:
        if isinstance(value, dict):
            if value.get("format") == "decimal":
                return {"type": ["number", "string"]}
            return {key: mended(one) for key, one in value.items()}
        return [mended(one) for one in value] if isinstance(value, list) else value

    return {key: mended(one) for key, one in schema.items()}
