"""The id of a batch leads to its region, and only for whom it was made."""

from __future__ import annotations

import pytest

from core.batches import NONCE_BYTES, batch_id, region_of
from core.types import RegionName

KEY = b"fleet"
NONCE = bytes(range(NONCE_BYTES))
EU = RegionName("eu-west-1")


def _made(namespace: str = "acme") -> str:
    return batch_id(EU, NONCE, fleet_key=KEY, namespace=namespace)


def test_there_and_back() -> None:
    assert region_of(_made(), fleet_key=KEY, namespace="acme") == EU
    assert _made() == _made()
    assert _made() != batch_id(EU, bytes(NONCE_BYTES), fleet_key=KEY, namespace="acme")


@pytest.mark.parametrize(
    ("key", "namespace"), [(b"another", "acme"), (KEY, ""), (KEY, "acm"), (KEY, "acme2")]
)
def test_of_another_fleet_or_tenant(key: bytes, namespace: str) -> None:
    assert region_of(_made(), fleet_key=key, namespace=namespace) is None


def test_nobody_can_aim_at_another_region() -> None:
    """Every single change of an id makes it lead nowhere."""
    made = _made()
    assert region_of(made.replace("eu", "us"), fleet_key=KEY, namespace="acme") is None
    for at in range(len(made)):
        for other in "0fz.":
            changed = made[:at] + other + made[at + 1 :]
            if changed != made:
                assert region_of(changed, fleet_key=KEY, namespace="acme") is None, changed


@pytest.mark.parametrize("text", ["", "eu", "eu.00.00", "é" * 70, "a" * 10_000, "..", "\0" * 90])
def test_what_is_no_id(text: str) -> None:
    assert region_of(text, fleet_key=KEY, namespace="acme") is None
