"""`skerry deploy`: an edge or a region of a topology, put where it belongs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from deploy.where import DEFAULT, AnyStateOption, AnyTopologyOption, topology_file


class Target(StrEnum):
    LOCAL = "local"
    KUBERNETES = "kubernetes"
    SSH = "ssh"


def deploy(
    unit: Annotated[
        str,
        typer.Argument(
            help="An edge or a region of the topology; local: also one that runs and is not in it "
            "any more."
        ),
    ],
    topology: AnyTopologyOption = None,
    target: Annotated[
        Target,
        typer.Option(help="The world that runs on this machine, a cluster, or hosts with systemd."),
    ] = Target.LOCAL,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be done, and change nothing.")
    ] = False,
    state: AnyStateOption = None,
    release: Annotated[
        Path | None,
        typer.Option(help="local: a folder with another release to run the unit from."),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="local, ssh: replace also what has not changed.")
    ] = False,
    canary: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=99,
            help="local, ssh: give a replaced region this percentage of its weight at first.",
        ),
    ] = None,
    watch: Annotated[
        float,
        typer.Option("--for", min=1, help="local, ssh: seconds for which a canary is watched."),
    ] = 60.0,
    wait: Annotated[
        float, typer.Option(min=1, help="local, ssh: seconds to wait for what runs to end.")
    ] = 600.0,
    ready_within: Annotated[
        float, typer.Option(min=1, help="local, ssh: seconds that what starts may take.")
    ] = 120.0,
    values: Annotated[
        Path | None,
        typer.Option(help="kubernetes: TOML with images, sizes, replicas; see docs/operating.md."),
    ] = None,
    wheelhouse: Annotated[
        Path | None,
        typer.Option(help="ssh: a folder of wheels to install from, instead of a package index."),
    ] = None,
    upload_models: Annotated[
        bool,
        typer.Option("--upload-models", help="ssh: send models by path that a host lacks."),
    ] = False,
) -> None:
    """Put an edge or a region where it belongs; doing it again changes only what differs.

    local: replace its processes in the running world one after the other, so that no request fails
    for it, with the topology that is given or the one that runs. What does not come up, or makes a
    canary worse, is taken back. One that is new is brought, one that is gone from the topology ends
    what it has and is stopped. kubernetes: apply its objects to the cluster of kubectl. ssh: the
    same as local, on the hosts that the topology names, as systemd units.
    """
    if target is Target.KUBERNETES:
        _to_cluster(unit, topology or DEFAULT, values, dry_run=dry_run)
        return
    if target is Target.SSH:
        from deploy.ssh.run import Ask, deploy_over_ssh
        from deploy.state import FOLDER
        from deploy.where import world_of

        ask = Ask(
            unit=unit,
            wheelhouse=wheelhouse,
            upload_models=upload_models,
            dry_run=dry_run,
            again=again,
            canary=canary,
            watch_s=watch,
            idle_s=wait,
            ready_s=ready_within,
        )
        deploy_over_ssh(world_of(topology or DEFAULT, state), ask, FOLDER / "wheelhouse", _say)
        return
    from deploy.rollout.messages import Deploy
    from deploy.rollout.running import asked

    what = Deploy(
        unit=unit,
        topology="" if topology is None else str(topology_file(topology).resolve()),
        release="" if release is None else str(release.resolve()),
        again=again,
        dry_run=dry_run,
        canary=canary,
        watch_s=watch,
        idle_s=wait,
        ready_s=ready_within,
    )
    for line in asked(what, state):
        _say(line)


def _say(line: str) -> None:
    print(line, flush=True)


def _to_cluster(unit: str, topology: str, values: Path | None, *, dry_run: bool) -> None:
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
