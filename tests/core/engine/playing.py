"""Schedules out of numbers: whoever draws the numbers draws the schedule."""

from __future__ import annotations

import random

from tests.core.engine.harness import Front, spec

Op = tuple[int, ...]
"""(what, a, b, c, …): small numbers that mean something only in `play`."""


def random_ops(dice: random.Random, count: int) -> list[Op]:
    return [tuple(dice.randrange(1000) for _ in range(6)) for _ in range(count)]


def play(front: Front, ops: list[Op]) -> None:
    """Turn numbers into a schedule: arrivals with shared beginnings, hand-overs, aborts, steps."""
    for number, (what, a, b, c, d, e) in enumerate(ops):
        name = f"s{number}"
        longest = front.context - 1
        length = 1 + a % min(longest, 90)
        family = b % 3
        own = c % 20
        prompt = [100 * family + 10 + i for i in range(length)]
        prompt[max(0, length - own) :] = [1000 + 50 * number + i for i in range(min(own, length))]
        wanted = spec(
            prompt,
            max_tokens=1 + d % 70,
            priority=(0, 0, 0, 1)[e % 4],
            namespace=("", "", "tenant")[e % 3],
            deadline_s=d / 5000 if e % 7 == 0 else None,
            move=(0, 0, 0, 32)[b % 4],
            keep=c % 2 == 0,
        )
        kind = what % 12
        if kind < 3:
            front.run(name, wanted)
        elif kind == 3:
            front.reserve(name, wanted)
        elif kind == 4:
            front.prefill(name, wanted)
        elif kind == 5 and front.named("reserved"):
            waiting = front.named("reserved")
            chosen = waiting[a % len(waiting)]
            if front.all[chosen].kind == "import":
                blocks = len(front.all[chosen].spec.token_ids) // 16
                front.adopt(chosen, 16 * (blocks if b % 2 else d % (blocks + 1)))
            else:
                front.begin(chosen, in_place=b % 4 > 0)
        elif kind == 6 and front.named("held"):
            held = front.named("held")
            front.release(held[a % len(held)])
        elif kind == 7:
            stages = ("queued", "reserved", "held", "parting")
            alive = [name for stage in stages for name in front.named(stage)]
            if alive:
                front.abort(alive[a % len(alive)])
        elif kind == 8 and length >= 16:
            whole = spec(prompt[: length // 16 * 16], namespace=wanted.namespace)
            if d % 3:
                front.bring(name, whole)
            else:
                front.hold(name, whole)
        else:
            for _ in range(1 + a % 5):
                front.step()
                front.now += 0.01
    front.finish_all()
