"""Route keys and block hashes: golden vectors, and what must hold for any prompt."""

from __future__ import annotations

import itertools

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from core.prefix import (
    ID_BYTES,
    MAX_CHAIN,
    TEXT_BLOCK_BYTES,
    affinity_key,
    block_hashes,
    block_root,
    key_of,
    next_block_hash,
    prompt_chain,
    records,
    route_chain,
    route_key,
)
from core.types import BLOCK_TOKENS, GenerateRequest, Message, ModelName, RequestId, Tool, ToolCall

KEY = b"fleet-secret-of-the-tests"


def _chat(*messages: Message, model: str = "m", namespace: str = "") -> GenerateRequest:
    return GenerateRequest(
        id=RequestId("r"),
        model=ModelName(model),
        messages=messages,
        seed=1,
        rendered_at=0,
        namespace=namespace,
    )


def _prompt(prompt: str | tuple[int, ...], model: str = "m") -> GenerateRequest:
    return GenerateRequest(
        id=RequestId("r"), model=ModelName(model), prompt=prompt, seed=1, rendered_at=0
    )


def _user(text: str) -> Message:
    return Message(role="user", content=text)


def _chain(request: GenerateRequest) -> list[bytes]:
    return route_chain(request, fleet_key=KEY)


CASES: dict[str, GenerateRequest] = {
    "short chat": _chat(_user("Hi")),
    "empty prompt": _prompt(""),
    "text": _prompt("The quick brown fox. " * 100),
    "ids": _prompt(tuple(range(300))),
    "tools": _chat(
        Message(role="system", content="Be brief."),
        Message(role="user", name="ann", content="Weather?"),
        Message(role="assistant", tool_calls=(ToolCall(id="c", name="weather", arguments="{}"),)),
        Message(role="tool", tool_call_id="c", content="18 °C"),
    ),
}

# Written once. A release that changes one of these moves every prefix to another region, and the
# caches with it: then it is a new hash with a new name, not this one.
GOLDEN: dict[str, str] = {
    "short chat": "2ecf07ab64a48453b73d51031914570a 1 1 16",
    "empty prompt": "03cb33a3e56c9c0704a4d708a4cc06bf 1 1 16",
    "text": "4d39a82bfbfb3ef87d0cfc9bbac9c370 2 5 2116",
    "ids": "2d3d1ec7c073ae7852177c53c33f1e86 2 3 1213",
    "tools": "287f3e3f340577f011c8dbddae0cca0f 2 4 147",
}
GOLDEN_AFFINITY = "03efc44cfcd88241483b758fb272d566"
GOLDEN_BLOCKS = [
    "21e591c55a252e3a6671305e752bc1e7",
    "0b47bebf1e4d9b3990c5ea6c069b1ade",
]


def test_golden_route_keys() -> None:
    keys = {
        name: f"{key.digest.hex()} {key.depth} {key.blocks} {key.text_bytes}"
        for name, request in CASES.items()
        for key in [route_key(request, fleet_key=KEY)]
    }
    assert keys == GOLDEN


def test_golden_affinity_key() -> None:
    assert affinity_key("session-7", fleet_key=KEY).hex() == GOLDEN_AFFINITY


def test_golden_block_hashes() -> None:
    hashes = block_hashes(block_root(b"weights", ""), list(range(40)))
    assert [one.hex() for one in hashes] == GOLDEN_BLOCKS


_texts = st.text(max_size=1500)
_messages = st.lists(
    st.builds(
        Message,
        role=st.sampled_from(["system", "user", "assistant", "tool"]),
        content=st.none() | _texts,
        name=st.none() | st.text(max_size=5),
    ),
    min_size=1,
    max_size=5,
)


@given(_messages, _messages)
def test_appending_messages_keeps_the_earlier_chain(
    first: list[Message], more: list[Message]
) -> None:
    before, after = _chain(_chat(*first)), _chain(_chat(*first, *more))
    assert after[: len(before)] == before
    assert len(after) > len(before)


@given(st.text(alphabet="abc é", min_size=1100, max_size=1300), _texts, _texts)
def test_prompts_that_share_their_beginning_share_the_depth_two_key(
    beginning: str, one: str, other: str
) -> None:
    """The first 1,024 bytes decide, whatever follows and however long it is."""
    keys = [
        route_key(request, fleet_key=KEY).digest
        for request in (_chat(_user(beginning + one + "!")), _chat(_user(beginning + other + "?")))
    ]
    assert keys[0] == keys[1]


def test_the_second_block_counts_and_the_third_does_not() -> None:
    text = "a" * (4 * TEXT_BLOCK_BYTES)

    def changed_at(place: int) -> bool:
        other = text[:place] + "b" + text[place + 1 :]
        keys = [route_key(_prompt(one), fleet_key=KEY) for one in (text, other)]
        return keys[0] != keys[1]

    assert changed_at(0)
    assert changed_at(TEXT_BLOCK_BYTES + 100)
    assert not changed_at(2 * TEXT_BLOCK_BYTES + 100)


def test_tools_come_first_and_in_their_order() -> None:
    """Their text stands before the conversation's in the prompt, so it does in the key."""
    plain = _chat(_user("Hi"))
    one, two = Tool(name="f", parameters='{"a": 1}'), Tool(name="g", description="d")
    chains = [
        _chain(msgspec.structs.replace(plain, tools=tools))
        for tools in ((), (one,), (one, two), (two, one), (Tool(name="f"),), (Tool(name="g"),))
    ]
    assert len({chain[1] for chain in chains}) == 5  # (one,) and (one, two) begin alike
    assert chains[1][:2] == chains[2][:2]
    assert len({chain[-1] for chain in chains}) == 6
    assert chains[0] == _chain(plain)


def test_what_else_is_in_the_key() -> None:
    request = _chat(_user("Hi"))
    key = route_key(request, fleet_key=KEY)
    others = [
        route_key(request, fleet_key=b"another-fleet-secret"),
        route_key(_chat(_user("Hi"), model="n"), fleet_key=KEY),
        route_key(_chat(_user("Hi"), namespace="acme"), fleet_key=KEY),
        route_key(_chat(Message(role="system", content="Hi")), fleet_key=KEY),
        route_key(_prompt("Hi"), fleet_key=KEY),
        route_key(_chat(_user("H"), _user("i")), fleet_key=KEY),
    ]
    assert len({key.digest, *(other.digest for other in others)}) == 7
    assert affinity_key("a", fleet_key=KEY) != affinity_key("a", fleet_key=KEY, namespace="x")


def test_a_record_that_ends_at_a_block_is_not_one_that_goes_on() -> None:
    head = len(b"".join(_records_head()))
    text = "a" * (TEXT_BLOCK_BYTES - head)
    ended, longer = _chain(_chat(_user(text))), _chain(_chat(_user(text + "a")))
    assert len(ended) == 2
    assert ended[1] != longer[1]


def test_the_chain_covers_half_a_megabyte_in_128_hashes() -> None:
    text = "a" * 700_000
    chain = prompt_chain(_prompt(text), fleet_key=KEY)
    assert chain.blocks == MAX_CHAIN == 128
    assert chain.text_bytes == len(text) + len(b"".join(records(_prompt(""))))
    sizes = [b - a for a, b in itertools.pairwise(chain.ends)]
    assert sizes == [512] * 32 + [2048] * 32 + [8192] * 64
    assert {len(one) for one in chain.ids()} == {ID_BYTES}
    changed = prompt_chain(_prompt(text[:300_000] + "b" + text[300_001:]), fleet_key=KEY)
    same = [a == b for a, b in zip(chain.hashes, changed.hashes, strict=True)]
    at = same.index(False)
    assert not any(same[at:])
    assert chain.ends[at - 1] <= 300_000 + 50 < chain.ends[at] + 50


def test_a_chain_of_many_short_messages_is_bounded() -> None:
    many = [_user(f"message {i}") for i in range(300)]
    chain = prompt_chain(_chat(*many), fleet_key=KEY)
    assert chain.blocks == MAX_CHAIN
    assert chain.ends[-1] < chain.text_bytes


def test_the_key_goes_deeper_while_its_block_is_hot() -> None:
    request = _prompt("a" * 4000)
    chain = prompt_chain(request, fleet_key=KEY)
    ids = chain.ids()
    assert key_of(chain) == route_key(request, fleet_key=KEY)
    assert key_of(chain, 2, set(ids[:1])).depth == 2  # what lies above the depth does not matter
    assert key_of(chain, 2, set(ids[:5])).depth == 6
    assert key_of(chain, 2, set(ids[:5])).digest == chain.hashes[6]
    assert key_of(chain, 2, set(ids)).depth == chain.blocks
    assert key_of(chain, 2, {ids[4]}).depth == 2
    assert key_of(chain, 2, set(ids)).hot
    assert not key_of(chain, 2, set(ids[:-1])).hot  # its last block tells it apart
    empty = prompt_chain(_chat(), fleet_key=KEY)
    assert (key_of(empty, 2, set(ids)).depth, empty.ids()) == (0, [])
    assert not key_of(empty, 2, set(ids)).hot


def _records_head() -> list[bytes]:
    return list(records(_chat(_user(""))))


@given(st.lists(st.integers(0, 2**31 - 1), max_size=100), st.integers(0, 99))
def test_block_hashes_chain(ids: list[int], place: int) -> None:
    root = block_root(b"weights", "ns")
    hashes = block_hashes(root, ids)
    assert len(hashes) == len(ids) // BLOCK_TOKENS
    assert block_hashes(root, ids + [1] * 5)[: len(hashes)] == hashes
    for number, known in enumerate(hashes):  # one by one, as answers grow
        before = hashes[number - 1] if number else root
        assert next_block_hash(before, ids[16 * number : 16 * number + 16]) == known
    if place < len(hashes) * BLOCK_TOKENS:
        changed = [*ids[:place], ids[place] ^ 1, *ids[place + 1 :]]
        block = place // BLOCK_TOKENS
        again = block_hashes(root, changed)
        assert again[:block] == hashes[:block]
        assert all(a != b for a, b in zip(again[block:], hashes[block:], strict=True))
    assert hashes == [] or hashes != block_hashes(block_root(b"weights", "other"), ids)
