"""Guesses and plans ahead with a real forward pass: the text is the one without them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from core.engine.engine import Engine
from core.engine.messages import EngineStats, RankConfig, Run, SequenceSpec, Stepped
from core.engine.plan import LoadedModel, SequenceId
from core.engine.runner_torch import TorchRunner
from tests.core.models.tiny import prompt, random_state, tiny_config, write_folder

Texts = dict[str, list[int]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TorchRunner, LoadedModel]]:
    config = tiny_config()
    source = write_folder(tmp_path_factory.mktemp("model"), config, random_state(config))
    runner = TorchRunner(
        RankConfig(node="n", socket_fd=-1, source=str(source), kv_blocks=64, dtype="float32")
    )
    yield runner, runner.load(lambda stage, fraction: None)
    runner.close()


SPECS = {
    "greedy": SequenceSpec(token_ids=tuple(prompt(9)), max_tokens=40, temperature=0),
    "seeded": SequenceSpec(token_ids=tuple(prompt(21)), max_tokens=40, temperature=0.9, seed=7),
    "penalised": SequenceSpec(
        token_ids=tuple(prompt(14)), max_tokens=40, temperature=0.7, seed=3, top_p=0.9,
        repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4,
    ),
    "scored": SequenceSpec(token_ids=tuple(prompt(5)), max_tokens=25, temperature=0, logprobs=2),
}  # fmt: skip


class Knowing:
    """A drafter that has read the text, and errs now and then."""

    def __init__(self, texts: Texts, dice: random.Random) -> None:
        self._texts = texts
        self._dice = dice

    def propose(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        for name, spec in SPECS.items():
            count = len(spec.token_ids)
            if tuple(tokens[:count]) == spec.token_ids:
                guess = self._texts[name][len(tokens) - count :][:most]
                wrong = self._dice.randrange(8)
                if wrong < len(guess):
                    guess[wrong] = (guess[wrong] + 1) % 300
                return tuple(guess)
        return ()


def play(
    loaded: tuple[TorchRunner, LoadedModel], names: Sequence[str], *, depth: int = 1,
    knowing: Knowing | None = None,
) -> tuple[Texts, EngineStats]:  # fmt: skip
    runner, model = loaded
    engine = Engine(
        model, runner, max_sequences=8, max_step_tokens=16, depth=depth,
        drafter=None if knowing is None else lambda: knowing,
    )  # fmt: skip
    texts: Texts = {name: [] for name in names}
    for name in names:
        engine.handle(Run(SequenceId(name), SPECS[name]))
    while engine.step():
        for message in engine.messages():
            assert isinstance(message, Stepped)
            for output in message.outputs:
                texts[output.sequence].extend(output.token_ids)
                if output.sequence == "scored":
                    assert len(output.scores) == len(output.token_ids)
    engine.scheduler.roster.check_integrity()
    return texts, engine.stats()


def test_texts_are_those_of_each_alone(loaded: tuple[TorchRunner, LoadedModel]) -> None:
    alone: Texts = {}
    for name in SPECS:
        alone |= play(loaded, [name])[0]
    assert all(len(alone[name]) == spec.max_tokens for name, spec in SPECS.items())
    for depth in (1, 2, 3):
        assert play(loaded, list(SPECS), depth=depth)[0] == alone
        dice = random.Random(depth)
        texts, stats = play(loaded, list(SPECS), depth=depth, knowing=Knowing(alone, dice))
        assert texts == alone
        assert stats.accepted_tokens > 10
        assert stats.drafted_tokens > stats.accepted_tokens
