"""How the steps of a rollout are taken back. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deploy.rollout.plan import Standing
from deploy.rollout.steps import (
    Beside,
    Heard,
    Idle,
    Kind,
    Ready,
    Replace,
    Reread,
    Rest,
    Shelve,
    Start,
    Step,
    Stop,
    Weigh,
)


def way_back(done: Sequence[Step], before: Standing) -> tuple[Step, ...]:
    """What leads back from `done`, whose last step may be half done. Steps that find nothing to
    take back do nothing."""
    mute = tuple(
        sorted({n for step in done if isinstance(step, Rest | Ready | Weigh) for n in step.but})
    )
    rests = {(step.kind, step.name): step.resting for step in done if isinstance(step, Rest)}
    replaced = [name for step in done if isinstance(step, Replace) for name in step.names]
    started = [step.name for step in done if isinstance(step, Start)]
    stopped = [step.name for step in done if isinstance(step, Stop)]
    told = [step for step in done if isinstance(step, Reread)]
    singles = {name: kind for kind, name in rests if kind is not Kind.REGION}
    together = [name for name in replaced if name not in singles]
    region = next((name for kind, name in rests if kind is Kind.REGION), None)
    steps: list[Step] = []
    if region is not None and (together or started) and not rests[Kind.REGION, region]:
        steps.append(Rest(Kind.REGION, region, True, but=mute))
        steps.append(Idle(Kind.REGION, region, must=False, but=mute))
    steps += [Stop(name) for name in reversed(started)]
    steps += [replace(step, back=True) for step in done if isinstance(step, Shelve)]
    steps += [replace(step, back=True) for step in reversed(told)]
    if together:
        steps += [Replace(tuple(together), back=True), Ready(tuple(together), mute)]
    steps += [Start(name) for name in reversed(stopped)]
    if stopped:
        steps.append(Ready(tuple(reversed(stopped)), mute))
    for name, kind in singles.items():
        if name in replaced:
            if not rests[kind, name]:
                steps.append(Rest(kind, name, True, but=mute))
                steps.append(Idle(kind, name, must=False, but=mute))
            steps += [Replace((name,), back=True), Ready((name,), mute)]
            if name not in before.resting:
                steps.append(Rest(kind, name, False, but=mute))
        else:  # a router that forgot it for a while has forgotten the operator's order too
            steps.append(Rest(kind, name, name in before.resting, but=mute))
    steps += [Beside(step.edge, back=True) for step in done if isinstance(step, Beside)]
    if together and region is not None:
        steps.append(Heard(region))
    for weighed in {step.region for step in done if isinstance(step, Weigh)}:
        steps.append(Weigh(weighed, before.weights.get(weighed, 0), mute))
    left = any(isinstance(step, Rest) and step.leaving for step in done)
    if region is not None and (left or region not in before.resting):
        steps.append(Rest(Kind.REGION, region, region in before.resting, but=mute))
    return tuple(steps)
