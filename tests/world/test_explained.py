"""`skerry explain` and `skerry status` over a whole world: why a prompt went where it went."""

import pytest

from core.story import StepName, waterfall
from deploy.explain import find, lines, newest
from deploy.launcher import LocalWorld
from deploy.status import edge_view, region_lines
from tests.world.faults import until
from tests.world.scripted import ask, completion

pytestmark = pytest.mark.world

SECRET_WORD = "xylophone"


def test_a_prompt_is_explained_from_its_choice_to_its_last_token(world: LocalWorld) -> None:
    prompt = f"explained, with a {SECRET_WORD}: " + "the keeper counts the ships. " * 60
    answer = ask(world.edges["ams"], completion(prompt, max_tokens=60))
    while not answer.facts["kv_bytes"]:  # until it is read by a prefill node
        prompt = f"again {prompt}"
        answer = ask(world.edges["ams"], completion(prompt, max_tokens=60))
    bases = list(world.edges.values())
    name = answer.headers["x-request-id"]
    assert until(lambda: bool(find(bases, name, None).outcome)), "its end is written down"
    story = find(bases, name, None)
    last = story.last
    assert last is not None
    assert (story.edge, story.outcome) == ("ams", "ok")
    assert last.region == answer.headers["x-skerry-region"]
    assert last.reason == answer.headers["x-skerry-route"]
    assert last.prefill == answer.headers["x-skerry-prefill"]
    [choice] = story.choices
    assert {one.region for one in choice.weighed} == {"eu", "us"}
    assert choice.key_depth == 2 < choice.key_blocks
    steps = {step.name: step for step in waterfall(story)}
    assert {
        StepName.ADMIT, StepName.ROUTE, StepName.TRAVEL, StepName.PREFILL, StepName.TRANSFER,
        StepName.DECODE,
    } <= set(steps)  # fmt: skip
    assert steps[StepName.TRAVEL].seconds >= 0.002  # the simulated round trip
    assert steps[StepName.TRANSFER].note.endswith("MB of KV")
    page = "\n".join(lines(story))
    assert SECRET_WORD not in page
    assert f"tried {last.region}" in page
    assert "worst step: " in page
    assert story.id in [one.id for one in newest(bases, 50, None)]


def test_status_shows_what_an_edge_weighs_regions_by(world: LocalWorld) -> None:
    def rows() -> list[list[str]]:
        return [line.split() for line in region_lines(edge_view(world.edges["nyc"]))]

    assert rows()[0][:3] == ["from-nyc", "state", "round-trip"]
    assert until(lambda: [row[:2] for row in rows()[1:]] == [["eu", "fresh"], ["us", "fresh"]])

    def far_is_farther() -> bool:
        far, near = (int(row[2].removesuffix("ms")) for row in rows()[1:])
        return far > near

    assert until(far_is_farther)
