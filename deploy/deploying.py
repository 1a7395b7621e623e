"""`skerry deploy`: an edge or a region of a topology, put where it belongs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from deploy.where import TopologyOption, topology_file


class Target(StrEnum):
    KUBERNETES = "kubernetes"


def deploy(
    unit: Annotated[str, typer.Argument(help="An edge or a region of the topology.")],
    topology: TopologyOption,
    target: Annotated[Target, typer.Option(help="Where to.")] = Target.KUBERNETES,
    values: Annotated[
        Path | None, typer.Option(help="TOML with images, sizes, replicas; see docs/operating.md.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be applied, and change nothing.")
    ] = False,
) -> None:
    """Put an edge or a region into the Kubernetes cluster that kubectl speaks to.

    Applying it again changes only what differs.
    """
    import yaml

    from core.config import load
    from core.errors import ConfigError
    from deploy.kubernetes.manifests import manifests
    from deploy.kubernetes.values import read_values

    given = read_values(values)
    world = load(topology_file(topology), state=Path(".skerry"))
    text = yaml.safe_dump_all(manifests(world.topology, unit, given), sort_keys=False)
    if dry_run:
        print(text, end="")
        return
    program = shutil.which("kubectl")
    if program is None:
        raise ConfigError("kubectl is not installed here; --dry-run prints what it would be given")
    done = subprocess.run(
        [program, "apply", "--namespace", given.namespace, "-f", "-"],
        input=text, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise ConfigError(f"kubectl refused it (exit code {done.returncode}); see above")
    print(f"{unit} is applied; `kubectl --namespace {given.namespace} get pods` shows it come up",
          file=sys.stderr)  # fmt: skip
