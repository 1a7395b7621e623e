"""The ring follows the weights that regions tell, and is built anew only for a change."""

from core.status import RegionMore, RegionStatus
from core.types import ModelName, RegionName
from edge.routing.rings import Rings
from edge.routing.seen import Heard, SeenRegion
from edge.routing.view import RegionView

EU, US = RegionName("eu"), RegionName("us")
MODELS = frozenset({ModelName("m")})


def view(weight: int | None) -> RegionView:
    """Of `eu` in the topology's weight 100, with an order for another."""
    heard = Heard()
    if weight is not None:
        heard.take(
            RegionStatus(region=EU, epoch="e", sequence=1, more=RegionMore(weight=weight)), now=0.0
        )
    return SeenRegion(EU, 0.01, MODELS, 100, heard).view(0.0)


def homes(rings: Rings, *regions: RegionView) -> int:
    """How many of 2,000 keys are at home in `eu`."""
    ring = rings.of(regions)
    return sum(ring.walk(number.to_bytes(16))[0] == EU for number in range(2000))


def test_an_order_moves_keys_and_taking_it_back_brings_them_home() -> None:
    rings = Rings({EU: 100, US: 100})
    usual = homes(rings, view(None))
    assert 900 < usual < 1100
    assert homes(rings, view(10)) < 300
    assert homes(rings, view(300)) > 1400
    assert homes(rings, view(0)) == usual
    assert homes(rings, view(None)) == usual


def test_the_same_weights_are_the_same_ring() -> None:
    rings = Rings({EU: 100, US: 100})
    first = rings.of([view(None)])
    assert rings.of([view(0)]) is first
    other = rings.of([view(50)])
    assert other is not first
    assert rings.of([view(50)]) is other
