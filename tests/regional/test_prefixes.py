"""What a region publishes of prompt beginnings, in step with what its nodes hold."""

from __future__ import annotations

from msgspec.structs import replace

from core.digest import Filter
from core.prefix import ID_BYTES, block_hashes, block_root, prompt_chain
from core.status import RegionPrefixes
from core.types import BLOCK_TOKENS, GenerateRequest, ModelName, RegionName, RequestId
from edge.routing.cache import Digest
from regional.prefixes import (
    FILTER_AGE_S,
    MAX_ADDED,
    MIN_INTERVAL_S,
    Prefixes,
    request_ids,
    standing_blocks,
)

TEXT = "stones and water, " * 400


def _request(text: str = TEXT) -> GenerateRequest:
    request = GenerateRequest(
        id=RequestId("r"), model=ModelName("m"), prompt=text, seed=1, rendered_at=0
    )
    chain = prompt_chain(request, fleet_key=b"k" * 16)
    return replace(
        request,
        route_chain=b"".join(chain.ids()),
        route_ends=(*chain.ends[1:], chain.text_bytes),
    )


class _Region:
    """One token per byte; `held` are the blocks of its only node."""

    def __init__(self, entries: int = 1000) -> None:
        self.held: set[bytes] = set()
        self.now = 100.0
        self.prefixes = Prefixes(
            RegionName("eu"), "e1", holds=lambda one: one in self.held, share=0.1, entries=entries
        )
        self.digest = Digest()
        self._base = 0

    def read(self, request: GenerateRequest) -> list[bytes]:
        ids = request_ids(request)
        tokens = request.route_ends[-1]
        hashes = block_hashes(block_root(b"w", ""), list(range(tokens)))
        self.held.update(hashes)
        self.prefixes.asked(ids, self.now)
        self.prefixes.read(ids, standing_blocks(request, hashes, tokens))
        return ids

    def tell(self, after_s: float = MIN_INTERVAL_S) -> RegionPrefixes:
        self.now += after_s
        frame, held = self.prefixes.publication(self.now)
        new = frame.base != self._base
        self._base = frame.base
        self.digest.take(replace(frame, filter=held) if new else frame)
        return frame


def test_what_was_read_is_published_within_one_frame() -> None:
    region = _Region()
    ids = region.read(_request())
    region.tell()
    assert all(region.digest.holds(one) for one in ids)
    more = region.read(_request("another beginning, " * 300))
    frame = region.tell()
    assert all(region.digest.holds(one) for one in more)
    assert set(request_ids(_request("another beginning, " * 300))) == {
        frame.added[at : at + ID_BYTES] for at in range(0, len(frame.added), ID_BYTES)
    }


def test_what_was_read_counts_before_its_node_has_told_of_it() -> None:
    region = _Region()
    ids = region.read(_request())
    told, region.held = region.held, set()
    region.tell()  # makes the first filter
    assert all(region.digest.holds(one) for one in ids)
    region.held = told
    region.read(_request("something else, " * 50))
    region.tell(FILTER_AGE_S)
    assert all(region.digest.holds(one) for one in ids)


def test_what_was_evicted_leaves_with_the_next_filter_and_comes_again() -> None:
    region = _Region()
    ids = region.read(_request())
    region.tell()
    region.held.clear()
    region.read(_request("keeps it busy, " * 100))
    region.tell(FILTER_AGE_S)
    assert not any(region.digest.holds(one) for one in ids[3:])  # the first time: from the filter
    region.read(_request())
    region.tell()
    assert all(region.digest.holds(one) for one in ids)


def test_a_block_stands_for_the_text_before_it_only() -> None:
    request = _request()
    tokens = request.route_ends[-1]
    hashes = block_hashes(block_root(b"w", ""), list(range(tokens)))
    stands = standing_blocks(request, hashes, tokens)
    for end, block in zip(request.route_ends, stands, strict=False):
        assert (hashes.index(block) + 1) * BLOCK_TOKENS <= end
        assert (hashes.index(block) + 2) * BLOCK_TOKENS > end
    assert standing_blocks(request, [], 3) == [b""] * len(stands)
    assert standing_blocks(replace(request, route_chain=b"", route_ends=()), hashes, 9) == []


def test_an_edge_that_sends_no_chain_is_no_trouble() -> None:
    region = _Region()
    old = replace(_request(), route_chain=b"", route_ends=())
    region.prefixes.asked(request_ids(old), region.now)
    region.prefixes.read(request_ids(old), standing_blocks(old, [b"x" * 16], 20))
    assert region.tell().version == 0


def test_frames_come_when_something_changed_and_not_too_often() -> None:
    region = _Region()
    region.read(_request())
    first = region.tell()
    assert region.tell(60.0).version == first.version
    region.read(_request("more of it, " * 100))
    assert region.tell().version == first.version + 1
    region.read(_request("and more, " * 100))
    assert region.tell(MIN_INTERVAL_S / 5).version == first.version + 1
    assert region.tell().version == first.version + 2


def test_everything_is_bounded() -> None:
    region = _Region(entries=50)
    for number in range(300):
        region.read(_request(f"{number} " * 1500))
    frame = region.tell()
    assert len(frame.added) <= MAX_ADDED * ID_BYTES
    region.read(_request())
    region.tell(FILTER_AGE_S)
    _, held = region.prefixes.publication(region.now)
    assert isinstance(held, Filter)
    assert len(held.bits) <= 50 * 10 // 8 + 8


def test_hot_beginnings_are_counted() -> None:
    region = _Region()
    for number in range(20):
        region.read(_request(TEXT + f"question {number} " * 50))
    frame = region.tell()
    shared = request_ids(_request())[:10]
    hot = {frame.hot[at : at + ID_BYTES] for at in range(0, len(frame.hot), ID_BYTES)}
    assert hot >= set(shared)
    assert frame.total == 20.0
    assert frame.counts[0] >= 18
