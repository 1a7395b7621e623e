from __future__ import annotations

import pytest

from core.engine.pending import Pending, accepted
from core.engine.plan import History, Row, RowResult, SampleSpec, SequenceId

A, B = SequenceId("a"), SequenceId("b")
SPEC = SampleSpec(
    temperature=0, top_p=1, top_k=0, seed=0, choice=0, position=4, history=History(b"", 0)
)


def row(tokens: tuple[int, ...], *, drafts: int = 0, follows: bool = False) -> Row:
    return Row(A, tokens, 10, ((0,),), SPEC, drafts=drafts, follows=follows)


@pytest.mark.parametrize(
    ("drawn", "counted"),
    [
        ((5, 6, 7, 8), (5, 6, 7, 8)),  # every guess right, and one more
        ((5, 6, 9, 8), (5, 6, 9)),
        ((9, 6, 7, 8), (9,)),
        ((5, 9, 7, 8), (5, 9)),
    ],
)
def test_guesses_count_up_to_the_first_wrong_one(
    drawn: tuple[int, ...], counted: tuple[int, ...]
) -> None:
    assert accepted(row((4, 5, 6, 7), drafts=3), drawn) == counted
    assert accepted(row((4,)), drawn[:1]) == drawn[:1]


def test_each_guess_is_sampled_at_its_place_and_with_its_history() -> None:
    specs = row((4, 5, 6), drafts=2).specs
    assert [spec.position for spec in specs] == [4, 5, 6]
    histories = [spec.history for spec in specs if spec.history is not None]
    assert [len(history.tokens) // 4 for history in histories] == [0, 1, 2]


def test_a_placeholder_becomes_the_token_of_the_step_before() -> None:
    pending = Pending()
    pending.note([RowResult(A, token_ids=(7, 8)), RowResult(B, token_ids=(9,))])
    ((found,), broken) = pending.resolve([row((0,), follows=True)])
    assert not broken
    assert found.token_ids == (8,)
    assert found.sample is not None
    assert found.sample.history == History((8).to_bytes(4, "little"), 0)
    assert found.sample.position == 4


def test_a_sequence_that_had_no_room_in_the_last_step_follows_the_one_before() -> None:
    pending = Pending()
    pending.note([RowResult(A, token_ids=(7,))])
    pending.note([RowResult(B, token_ids=(9,))])
    ((found,), _) = pending.resolve([row((0,), follows=True)])
    assert found.token_ids == (7,)


def test_what_follows_nothing_is_an_error_of_its_own() -> None:
    pending = Pending()
    pending.note([RowResult(A, token_ids=(5,))])
    pending.note([RowResult(A, error="broken"), RowResult(B, token_ids=(9,))])
    whole, (broken,) = pending.resolve([row((0,), follows=True), row((3,))])
    assert [one.token_ids for one in whole] == [(3,)]
    assert broken.sequence == A
    assert broken.error is not None
