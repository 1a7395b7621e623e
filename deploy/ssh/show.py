"""What `--dry-run` shows of a deploy over ssh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from core.config import World
from deploy.rollout.steps import Beside, Replace, Reread, Start, Step, Stop
from deploy.ssh import install, things
from deploy.ssh.channel import Facts, Host
from deploy.ssh.stage import Unit
from deploy.ssh.units import Place

if TYPE_CHECKING:
    from deploy.ssh.run import Aim


def shown(
    world: World,
    aims: Sequence[Aim],
    made: Mapping[str, Unit],
    steps: Sequence[Step],
    place_of: Callable[[Host], Place],
) -> Iterator[str]:
    """Hosts, what they are sent, units that change, steps."""
    for aim in aims:
        host, place = aim.host, aim.goal.place
        yield f"host {host.name}: {_about(host.facts)}"
        there = install.installed(host, place, aim.release.digest) is not None
        if there:
            yield f"  release {aim.release.digest} is there"
        else:
            lacking = install.missing(host, place, aim.release.house)
            size = sum(one.size for one in lacking) / 1e6
            yield (
                f"  release {aim.release.digest}: send {len(lacking)} of "
                f"{len(aim.release.house.wheels)} wheels, {size:,.1f} MB; install them into "
                f"{place.release(aim.release.digest)}"
            )
        for model in aim.models:
            yield f"  model {model.model}: {'send it to ' if model.upload else ''}{model.path}"
        for path in things.paths(world, aim.seats, place):
            yield f"  put {path} where it differs"
    names = _changed(steps)
    for name in names:
        unit = made[name]
        if unit.after is None:
            yield f"\nremove {unit.host.name}:{unit.path}"
            continue
        yield f"\nwrite {unit.host.name}:{unit.path}"
        yield from (f"    {line}".rstrip() for line in unit.after.splitlines())
    yield "" if steps else "nothing to do: it runs already"
    for number, step in enumerate(steps, start=1):
        yield f"{number}. {step}{_commands(step, made)}"


def _about(facts: Facts) -> str:
    libc = " ".join(facts.libc) if facts.libc[0] else "musl"
    return (
        f"Python {facts.python}, {facts.machine}, {libc}, systemd {facts.systemd} "
        f"({facts.manager}), {facts.free_bytes / 1e9:.1f} GB free at {facts.folder}"
    )


def _changed(steps: Sequence[Step]) -> list[str]:
    found: dict[str, None] = {}
    for step in steps:
        match step:
            case Replace(names):
                found |= dict.fromkeys(names)
            case Start(name) | Stop(name) | Reread(name) | Beside(name):
                found[name] = None
    return list(found)


def _commands(step: Step, made: Mapping[str, Unit]) -> str:
    """What is run on which host."""
    match step:
        case Replace(names):
            pairs = [("restart", made[name]) for name in names]
        case Start(name):
            pairs = [("enable --now", made[name])]
        case Stop(name):
            pairs = [("disable --now", made[name])]
        case Beside(name):
            pairs = [("reload", made[name])]
        case _:
            return ""
    return "".join(
        f"\n     {unit.host.name}: systemctl "
        f"{'--user ' if unit.host.facts.manager == 'user' else ''}{verb} {unit.service}"
        for verb, unit in pairs
    )
