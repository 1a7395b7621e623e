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


def test_every_port_is_tried_once() -> None:
    ports = list(shuffled())
    assert sorted(ports) == list(range(LOWEST, HIGHEST))
    assert HIGHEST <= 32_768  # below what systems give to connections
