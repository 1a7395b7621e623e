"""Ports of worlds that start at the same moment."""

from contextlib import closing
from pathlib import Path

from deploy.port_claims import HIGHEST, LOWEST, Claims, shuffled


def test_a_claimed_port_is_nobody_elses_until_it_is_free(tmp_path: Path) -> None:
    with closing(Claims(tmp_path)) as second:
        with closing(Claims(tmp_path)) as first:
            assert first.take(20_001)
            assert first.take(20_002)
            assert not second.take(20_001)
            assert second.take(20_003)
        assert second.take(20_001)


def test_one_port_of_many_is_given_back(tmp_path: Path) -> None:
    with closing(Claims(tmp_path)) as other:
        with closing(Claims(tmp_path)) as ours:
            assert ours.take(20_001)
            assert ours.take(20_002)
            ours.give(20_001)
            ours.give(20_003)
            assert other.take(20_001)
            assert not other.take(20_002)
            ours.give(20_001)
            assert not ours.take(20_001), "what another has is not given"
        ours.give(20_002)
        assert other.take(20_002)


def test_every_port_is_tried_once() -> None:
    ports = list(shuffled())
    assert sorted(ports) == list(range(LOWEST, HIGHEST))
    assert HIGHEST <= 32_768  # below what systems give to connections
