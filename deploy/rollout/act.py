"""Takes the steps of a plan, and takes them back when one fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from core.errors import ConfigError
from deploy.fleet import WorldEnds
from deploy.rollout.back import way_back
from deploy.rollout.plan import Standing
from deploy.rollout.steps import Step


class RolledBack(ConfigError):
    """A rollout failed; the message says why, and how the world is now."""


class Stage(Protocol):
    """Where steps are taken."""

    def take(self, step: Step) -> None:
        """Returns when it is done. Raises ConfigError."""
        ...


def roll_out(
    plans: Sequence[Sequence[Step]], before: Standing, stage: Stage, say: Callable[[str], None]
) -> None:
    """The steps of one unit after the other; all units go back where one fails. Raises RolledBack,
    WorldEnds."""
    done: list[list[Step]] = []
    total, number = sum(map(len, plans)), 0
    for steps in plans:
        done.append([])
        for step in steps:
            number += 1
            say(f"[{number}/{total}] {step}")
            done[-1].append(step)
            try:
                stage.take(step)
            except WorldEnds:
                raise
            except (ConfigError, OSError) as error:  # such as no room for another process
                say(f"  failed: {error}")
                back = [one for unit in reversed(done) for one in way_back(unit, before)]
                _go_back(back, stage, say, str(error))


def _go_back(steps: Sequence[Step], stage: Stage, say: Callable[[str], None], why: str) -> None:
    """Takes all of them, also past one that fails. Always raises RolledBack."""
    failures: list[str] = []
    for step in steps:
        say(f"[back] {step}")
        try:
            stage.take(step)
        except WorldEnds:
            raise
        except (ConfigError, OSError) as error:
            say(f"  failed: {error}")
            failures.append(f"{step}: {error}")
    if failures:
        raise RolledBack(f"{why}\nand the way back failed as well: {'; '.join(failures)}")
    raise RolledBack(f"{why}\nthe world is as it was")
