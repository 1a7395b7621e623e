"""What many answers come to, and the shapes of load."""

from __future__ import annotations

from html import escape

import msgspec
import pytest

from loadtest.users import __main__ as users
from loadtest.users import prompts
from loadtest.users.answers import Answer, Slo, Spread, errors, groups, lines, verdict
from loadtest.users.report import OVERLAP, section, with_section
from loadtest.users.running import Failed, bases_of
from loadtest.users.shapes import SHAPES, spike, step

GOOD = Answer(
    kind="conversation", edge="http://a", region="eu", error="", at_s=0.0, ttft_s=0.5,
    per_token_s=0.02, total_s=1.0, prompt_tokens=100, cached_tokens=80, completion_tokens=10,
)  # fmt: skip
SLO = Slo(ttft_s=1.0, per_token_s=0.1, share=0.75)


def but(**changed: object) -> Answer:
    return msgspec.structs.replace(GOOD, **changed)


def test_an_answer_is_good_when_whole_and_within_both() -> None:
    assert SLO.holds(GOOD)
    assert SLO.holds(but(per_token_s=None))  # of one token there is no time per token
    assert not SLO.holds(but(ttft_s=1.1))
    assert not SLO.holds(but(per_token_s=0.11))
    assert not SLO.holds(but(error="cut"))
    assert not SLO.holds(but(ttft_s=None))


def test_the_verdict_counts_what_failed() -> None:
    failed = but(error="429 rate_limit_exceeded", ttft_s=None)
    assert verdict([GOOD, GOOD, GOOD, failed], SLO)[0]
    bad, words = verdict([GOOD, failed], SLO)
    assert not bad
    assert "50.0% of 2 requests" in words
    assert verdict([], SLO) == (False, "no request was sent")
    assert errors([GOOD, failed, failed]) == [("429 rate_limit_exceeded", 2)]


def test_rows_by_kind_edge_and_region() -> None:
    answers = [GOOD, but(edge="http://b", region="us", cached_tokens=0), but(kind="agent")]
    rows = {one.name: one for one in groups(answers, SLO)}
    assert list(rows) == ["all", "kind agent", "kind conversation", "edge http://a",
                          "edge http://b", "region eu", "region us"]  # fmt: skip
    assert rows["all"].cached_share == 160 / 300
    assert rows["edge http://b"].cached_share == 0.0
    text = lines(answers, SLO, seconds=10.0)
    assert text[1].split()[:2] == ["all", "3"]
    assert text[1].split()[-2:] == ["0.30", "3"]  # 3 good ones and 30 tokens in 10 seconds


def test_rows_of_locusts_that_overlap_are_explained() -> None:
    assert "Aggregated" in OVERLAP
    assert escape(OVERLAP) in section([GOOD], SLO, seconds=10.0)


@pytest.mark.parametrize(
    ("given", "bases"),
    [
        ("127.0.0.1:8787", ["http://127.0.0.1:8787"]),
        ("localhost:1, https://b/ ,", ["http://localhost:1", "https://b"]),
        ("http://a:1/x/", ["http://a:1/x"]),
    ],
)
def test_addresses_of_servers_may_be_bare(given: str, bases: list[str]) -> None:
    assert bases_of(given) == bases


@pytest.mark.parametrize("given", ["ftp://a", "http://", "a,http:///x", ",", "a:port"])
def test_what_is_no_address_of_a_server_is_refused(
    given: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(users, "needs_locust", lambda: None)
    with pytest.raises(Failed, match="is no base URL of a server"):
        bases_of(given)
    assert users.main(["--edges", given]) == 2
    assert "such as http://127.0.0.1:8787" in capsys.readouterr().err


def test_the_help_says_where_a_key_goes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        users.main(["--help"])
    assert "SKERRY_KEY" in capsys.readouterr().out


def test_the_table_goes_into_the_report() -> None:
    answers = [GOOD, but(kind="<agent>", error="cut")]
    page = with_section("<body><p>Locust's</p></body></html>", section(answers, SLO, seconds=10.0))
    assert page.startswith("<body><p>Locust's</p><section")
    assert page.endswith("</section></body></html>")
    assert "kind &lt;agent&gt;</td>" in page
    assert "<li>1 × cut</li>" in page
    assert "50.0% of 2 requests" in page


def test_spread_by_nearest_rank() -> None:
    spread = Spread.of(float(n) for n in range(1, 101))
    assert spread == Spread(51.0, 91.0, 100.0)
    assert Spread.of([]) is None


def test_shapes() -> None:
    assert [spike(t, 100, 5) for t in (0, 39, 40, 59, 60)] == [5, 5, 50, 50, 5]
    assert [step(t, 100, 10) for t in (0, 20, 45, 99)] == [2, 4, 6, 10]
    noon, night = SHAPES["diurnal"](50, 100, 10), SHAPES["diurnal"](0, 100, 10)
    assert (night, noon) == (1, 10)


def test_equal_numbers_are_equal_words() -> None:
    assert prompts.words(7, 30) == prompts.words(7, 30) != prompts.words(8, 30)
    first = prompts.from_blocks([1, 2, 3], 10)
    assert first.startswith(prompts.from_blocks([1, 2], 10))
    assert not prompts.from_blocks([4, 2], 10).startswith(prompts.from_blocks([1], 10))
