"""A workload that is made, not recorded: what the choice was never tuned on.

Tenants of unequal size with a shared beginning each, conversations that grow by turns, and now and
then a document that several people ask about within seconds, each with a question of their own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from loadtest.simulator.traces import BLOCK_TOKENS, Request, block_hash, chain_of

SPAN_S = 1800.0
TENANTS = 60
MOST_SHARED = 48
CONVERSATIONS_PER_S = 1.2
DOCUMENT_EVERY_S = 40.0
ASKERS = (5, 25)
ASKED_WITHIN_S = 10.0
PAGES = (16, 64)
THINK_S = 40.0
ANSWER_TOKENS = 300.0
_TURNS_GO_ON = 0.6
_OPENING, _TURN = 20.0, 6.0
"""Mean blocks of 512 tokens in an opening, and that a turn adds."""


def made(seed: int) -> list[Request]:
    """In the order of time."""
    chance = random.Random(f"made {seed}")
    shared = [
        [block_hash(f"made {seed} tenant {tenant} {place}") for place in range(count)]
        for tenant, count in enumerate(chance.randint(0, MOST_SHARED) for _ in range(TENANTS))
    ]
    sizes = [1.0 / (rank + 1) for rank in range(TENANTS)]
    found: list[Request] = []
    for number, at_s in enumerate(_moments(chance, CONVERSATIONS_PER_S)):
        beginning = chance.choices(shared, sizes)[0]
        found += _talk(chance, f"{seed} talk {number}", at_s, beginning)
    for number, at_s in enumerate(_moments(chance, 1 / DOCUMENT_EVERY_S)):
        pages = [
            block_hash(f"made {seed} document {number} {page}")
            for page in range(chance.randint(*PAGES))
        ]
        for asker in range(chance.randint(*ASKERS)):
            asked_s = at_s + chance.uniform(0.0, ASKED_WITHIN_S)
            found += _talk(chance, f"{seed} document {number} {asker}", asked_s, pages)
    return sorted((one for one in found if one.at_s < SPAN_S), key=lambda one: one.at_s)


def _moments(chance: random.Random, per_s: float) -> Iterator[float]:
    now = chance.expovariate(per_s)
    while now < SPAN_S:
        yield now
        now += chance.expovariate(per_s)


def _talk(
    chance: random.Random, name: str, at_s: float, beginning: list[bytes]
) -> Iterator[Request]:
    """The turns of one conversation: each prompt holds the one before, its answer, and a little
    that does not fill its last block."""
    user, blocks, mean = block_hash(f"user {name}"), list(beginning), _OPENING
    while True:
        grown = 1 + int(chance.expovariate(1 / mean))
        blocks = [*blocks, *(block_hash(f"{name} {len(blocks) + i}") for i in range(grown))]
        tokens = len(blocks) * BLOCK_TOKENS
        answer = 1 + int(chance.expovariate(1 / ANSWER_TOKENS))
        yield Request(at_s, tuple(blocks), tokens, answer, user, chain_of(blocks, tokens))
        if chance.random() > _TURNS_GO_ON:
            return
        at_s, mean = at_s + chance.expovariate(1 / THINK_S), _TURN
