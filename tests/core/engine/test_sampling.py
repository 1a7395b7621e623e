"""B16: what sampling depends on survives preemption, company, plans ahead and guesses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from core.engine import guessing
from core.engine.drafter import Drafter
from core.engine.engine import Engine
from core.engine.messages import RankConfig, Run, SequenceFailed, SequenceSpec, Stepped
from core.engine.plan import LoadedModel, Scores, SequenceId
from core.engine.runner_torch import TorchRunner
from core.types import FinishReason
from tests.core.models.tiny import prompt, random_state, tiny_config, write_folder

Loaded = tuple[TorchRunner, LoadedModel]
Make = Callable[[int], Loaded]

SPECS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "seed": 5},
    "choice": {"temperature": 0.8, "seed": 5, "choice": 1},
    "presence": {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    "repetition": {"temperature": 0.7, "seed": 9, "repetition_penalty": 1.3, "min_p": 0.05},
    "bias": {"temperature": 0, "logit_bias": ((7, 3.0), (8, 2.9)), "frequency_penalty": 0.3},
}


def spec(which: int, /, **more: Any) -> SequenceSpec:
    fields: dict[str, Any] = {"max_tokens": 60, "logprobs": 2}
    return SequenceSpec(token_ids=tuple(prompt(40, which)), **fields | more)


@dataclass
class Heard:
    tokens: list[int] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    finish: FinishReason | None = None


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """Runners with so many KV blocks, loaded once."""
    config = tiny_config()
    folder = write_folder(tmp_path_factory.mktemp("model"), config, random_state(config))
    runners: list[TorchRunner] = []

    @cache
    def loaded(blocks: int) -> Loaded:
        config = RankConfig(
            node="n", socket_fd=-1, source=str(folder), kv_blocks=blocks, dtype="float32"
        )
        runners.append(TorchRunner(config))
        return runners[-1], runners[-1].load(lambda stage, fraction: None)

    yield loaded
    for runner in runners:
        runner.close()


def answers(
    model: Loaded,
    wanted: Sequence[SequenceSpec],
    *,
    depth: int = 1,
    drafter: Callable[[], Drafter] | None = None,
) -> tuple[list[Heard], int]:
    """All of them at once; and how often somebody was preempted."""
    runner, loaded = model
    engine = Engine(
        loaded, runner, max_sequences=8, max_step_tokens=64, depth=depth, drafter=drafter
    )
    heard = {f"s{n}": Heard() for n in range(len(wanted))}
    for name, one in zip(heard, wanted, strict=True):
        engine.handle(Run(SequenceId(name), one))
    for _ in range(5000):
        busy = engine.step()
        for message in engine.messages():
            assert not isinstance(message, SequenceFailed), message
            if isinstance(message, Stepped):
                for output in message.outputs:
                    mine = heard[output.sequence]
                    mine.tokens += output.token_ids
                    mine.scores += output.scores
                    mine.finish = output.finish
        if not busy and all(one.finish for one in heard.values()):
            return list(heard.values()), engine.stats().preemptions
    raise AssertionError("the engine does not come to an end")


def same(found: Heard, expected: Heard) -> None:
    assert (found.tokens, found.finish) == (expected.tokens, expected.finish)
    assert len(found.scores) == len(found.tokens)
    for ours, theirs in zip(found.scores, expected.scores, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert ours.top_logprobs == pytest.approx(theirs.top_logprobs, abs=1e-4)


@pytest.fixture(scope="module")
def solo(make: Make) -> dict[str, Heard]:
    return {
        name: answers(make(64), [spec(n, **more)])[0][0]
        for n, (name, more) in enumerate(SPECS.items())
    }


class Oracle:
    """Knows the answers by their prompts: two right guesses, then a wrong one."""

    def __init__(self, texts: dict[tuple[int, ...], list[int]]) -> None:
        self._texts = texts
        self.asked = 0

    def propose(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        text = self._texts[tuple(tokens[:40])]
        done = len(tokens) - 40
        self.asked += 1
        return (*text[done : done + 2], (text[min(done + 2, 59)] + 1) % 320)[:most]


def three_guesses(
    wishes: Sequence[tuple[object, int]], cost: object, *, room: int, **others: int
) -> list[int]:
    lengths = []
    for _, most in wishes:
        lengths.append(max(0, min(most, 3, room)))
        room -= lengths[-1]
    return lengths


@pytest.mark.parametrize("how", ["plain", "ahead", "guessing"])
def test_a_crowd_in_too_little_memory_writes_what_each_writes_alone(
    how: str, make: Make, solo: dict[str, Heard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guessing, "draft_lengths", three_guesses)
    wanted = [spec(n, **more) for n, more in enumerate(SPECS.values())]
    texts = (one.tokens for one in solo.values())
    oracle = Oracle(dict(zip((one.token_ids for one in wanted), texts, strict=True)))
    found, preempted = answers(
        make(12),
        wanted,
        depth=2 if how == "ahead" else 1,
        drafter=(lambda: oracle) if how == "guessing" else None,
    )
    assert preempted > 0
    assert (oracle.asked > 60) == (how == "guessing")
    for one, (name, expected) in zip(found, solo.items(), strict=True):
        same(one, expected)
        assert len(one.tokens) == 60, name
    assert solo["seeded"].tokens != solo["choice"].tokens


def test_a_continued_answer_goes_on_as_it_would_have(make: Make, solo: dict[str, Heard]) -> None:
    """The penalties see the tokens of an earlier life."""
    for n, (name, more) in enumerate(SPECS.items()):
        whole = solo[name]
        rest, _ = answers(make(64), [spec(n, output_ids=tuple(whole.tokens[:25]), **more)])
        assert rest[0].tokens == whole.tokens[25:], name


def test_penalties_and_bias_change_the_text(make: Make, solo: dict[str, Heard]) -> None:
    for name in ("presence", "bias"):
        n = list(SPECS).index(name)
        plain, _ = answers(make(64), [spec(n, temperature=0)])
        assert plain[0].tokens != solo[name].tokens, name
    assert len(set(solo["presence"].tokens)) > 40, "it repeats itself less"


def test_no_end_before_min_tokens(make: Make, solo: dict[str, Heard]) -> None:  # B19
    ends = frozenset(solo["greedy"].tokens[:4])
    early, late = (
        answers(make(64), [spec(0, temperature=0, stop_ids=ends, min_tokens=least)])[0][0]
        for least in (0, 10)
    )
    assert (len(early.tokens), early.finish) == (1, FinishReason.STOP)
    assert len(late.tokens) > 10
    assert not ends & set(late.tokens[:10])


def test_impossible_choices_end_alone(make: Make, solo: dict[str, Heard]) -> None:
    """Nothing is left to choose: an error of that sequence and no other."""
    runner, loaded = make(64)
    engine = Engine(loaded, runner, max_sequences=8, max_step_tokens=64)
    all_ids = frozenset(range(loaded.vocab_size))
    engine.handle(Run(SequenceId("good"), spec(0, temperature=0)))
    engine.handle(Run(SequenceId("bad"), spec(1, stop_ids=all_ids, min_tokens=5)))
    tokens: list[int] = []
    failed: list[str] = []
    while engine.step():
        for message in engine.messages():
            if isinstance(message, SequenceFailed):
                failed.append(message.sequence)
            elif isinstance(message, Stepped):
                tokens += [t for one in message.outputs for t in one.token_ids]
    assert failed == ["bad"]
    assert tokens == solo["greedy"].tokens
