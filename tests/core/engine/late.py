"""A scripted runner that computes when the result is asked for, as a device does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from core.engine.plan import LoadedModel, Runner, StepHandle, StepPlan, StepResult, Work
from core.engine.scripted import ScriptedRunner


class LateHandle:
    def __init__(self, runner: Runner, plan: StepPlan) -> None:
        self._runner = runner
        self._plan = plan

    def result(self) -> StepResult:
        """Its time is a function of the plan, so that a schedule is the same each time."""
        rows = self._runner.submit(self._plan).result().rows
        return StepResult(self._plan.number, rows, 0.01 + 0.0001 * self._plan.tokens)

    def add_done_callback(self, done: Callable[[LateHandle], object], /) -> None:
        raise AssertionError("nobody waits for the end of a step that begins when it is collected")


class LateRunner:
    """`plans`: what it was asked, the last of it."""

    def __init__(self, inner: ScriptedRunner) -> None:
        self._inner = inner
        self.plans: deque[StepPlan] = deque(maxlen=10_000)

    def load(self, progress: object) -> LoadedModel:
        return self._inner.load(lambda stage, fraction: None)

    def work(self) -> Work:
        return Work()

    def submit(self, plan: StepPlan) -> StepHandle:
        self.plans.append(plan)
        return LateHandle(self._inner, plan)

    def close(self) -> None:
        self._inner.close()
