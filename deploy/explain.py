"""`skerry explain`: what an edge remembers of a request, as a waterfall with its reasons."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import httpx
import msgspec

from core.errors import ConfigError
from core.events import Placing
from core.headers import SECRET_HEADER
from core.story import Choice, Step, StepName, Story, StoryPage, Try, waterfall, worst
from deploy.calling import edge_client
from deploy.client import AskFailed, refusal, unreachable

BAR = 32
"""Characters of a bar that fills the whole time."""
SECRET_FILE = "region.secret"
NO_KEY = "-"
"""Stands for a key's ID in a story of a caller without one."""
WHY = {
    "affinity": "the home of the caller's affinity id",
    "affinity_spill": "the affinity id's home is full or out",
    "nearest_short": "a short prompt goes to the faster of two near regions",
    "prefix_home": "the home of the prompt's beginning",
    "prefix_held": "it holds so much of the prompt that it is the fastest",
    "fastest": "nearer or idler, though it has to read the prompt",
    "prefix_spill": "the home of the prompt's beginning is full or out",
    "failover": "an earlier region failed before the first piece of the answer",
}
WHY_NODES = {
    "split": "a prefill node reads it, while the decode node's streams go on",
    "short_remainder": "what was left to read is below the region's split_min_tokens",
    "cached_on_decode": "the decode node holds more of it than any prefill node",
    "split_does_not_pay": "by the measured rates the decode node is as quick",
    "combined": "the node reads and answers",
    "no_prefill_node": "no prefill node for this model is up",
    "prefill_busy": "waiting for a prefill node would have taken longer",
    "one_token": "an answer of one token is never split",
    "recompute": "a hand-off had failed before",
}
HEADS = ("region", "standing", "round trip", "wait", "read", "predicted", "compared", "holds",
         "work")  # fmt: skip


def find(bases: Sequence[str], name: str, secret: str | None) -> Story:
    """The request, from whichever edge had it. Raises ConfigError, which says what each said."""
    said: list[str] = []
    for base in bases:
        try:
            page = _page(base, f"/explain/{name}", secret)
        except AskFailed as error:
            said.append(str(error))
            continue
        if page.stories:
            return page.stories[0]
    raise ConfigError("\n".join(dict.fromkeys(said)) or "no edge to ask; name one with --edge")


def newest(bases: Sequence[str], count: int, secret: str | None) -> list[Story]:
    """The last requests of all the edges, the newest first. Raises AskFailed."""
    pages = [_page(base, f"/explain?newest={count}", secret) for base in bases]
    stories = [story for page in pages for story in page.stories]
    return sorted(stories, key=lambda story: -story.at)[:count]


def recent_lines(base: str, count: int = 8) -> list[str]:
    """The last requests of one edge, for `skerry status`; why they are not shown, if they are
    not."""
    try:
        stories = newest([base], count, None)
    except AskFailed as error:
        return [f"last requests: {error}"]
    if not stories:
        return ["no request yet"]
    table = rows(stories)
    return [*aligned(table, len(table[0])), "skerry explain ID tells more of one"]


def secret_of(state: Path | None) -> str | None:
    """The region's secret, for an edge that is not on this machine. Raises ConfigError."""
    if state is None:
        return None
    try:
        return (state / SECRET_FILE).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"{state / SECRET_FILE}: {error.strerror}") from error


def lines(story: Story) -> Iterator[str]:
    """All that is known, for a terminal of 100 columns or a pipe."""
    yield from _head(story)
    for number, choice in enumerate(story.choices):
        yield ""
        yield from _choice(choice, again=number > 0)
    if story.tries:
        yield ""
        for one in story.tries:
            yield from _tried(one)
    steps = waterfall(story)
    total_s = story.age_s if story.ended_s is None else story.ended_s
    yield ""
    yield f"where the time went: {_ms(total_s)} in all"
    yield from (_bar(step, total_s) for step in steps)
    longest = worst(steps)
    if longest is not None and total_s > 0:
        about = f" ({longest.note})" if longest.note else ""
        share = min(1.0, longest.seconds / total_s)
        yield f"worst step: {longest.name}, {_ms(longest.seconds)}, {share:.0%} of it{about}"


def rows(stories: Iterable[Story]) -> list[tuple[str, ...]]:
    """A line for each request, heads first."""
    out: list[tuple[str, ...]] = [
        ("id", "ago", "edge", "tenant", "region", "why", "outcome", "took", "worst")
    ]
    for story in stories:
        longest = worst(waterfall(story))
        last = story.last
        out.append(
            (
                story.id,
                f"{story.age_s:.0f}s",
                story.edge,
                story.tenant or "–",
                last.region if last else "–",
                last.reason if last else "–",
                story.outcome or "running",
                _ms(story.age_s if story.ended_s is None else story.ended_s).replace(" ", ""),
                longest.name.replace(" ", "_") if longest else "–",
            )
        )
    return out


def aligned(table: Sequence[tuple[str, ...]], first_number: int) -> Iterator[str]:
    """Columns from `first_number` on stand to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = [
            cell.rjust(width) if place >= first_number else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _page(base: str, path: str, secret: str | None) -> StoryPage:
    headers = {} if secret is None else {SECRET_HEADER: secret}
    try:
        with edge_client(base) as client:
            answer = client.get(base.rstrip("/") + path, headers=headers)
        if not answer.is_success:
            raise AskFailed(f"{base}: {refusal(answer)}")
        return msgspec.json.decode(answer.content, type=StoryPage)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise AskFailed(unreachable(base, error)) from error
    except msgspec.MsgspecError as error:
        raise AskFailed(f"{base} is not a Skerry edge: {error}") from error


def _head(story: Story) -> Iterator[str]:
    how = "streamed" if story.stream else "whole"
    yield (
        f"request {story.id}: {story.dialect}, {story.model or 'not parsed'}, {how}; edge "
        f"{story.edge}, process {story.worker}; {story.age_s:.0f} s ago; "
        f"{story.outcome or 'still running'}"
    )
    if story.tenant:
        with_key = "without a key" if story.key == NO_KEY else f"key {story.key}"
        with_key = f"by its Worker {story.by}" if story.by else with_key
        yield f"asked by {story.tenant}, {with_key}"
    if story.prompt_tokens:
        yield (
            f"{story.prompt_tokens} prompt tokens, {story.cached_tokens} of them cached; "
            f"{story.completion_tokens} generated"
        )


def _choice(choice: Choice, *, again: bool) -> Iterator[str]:
    first = choice.order[0] if choice.order else "no region"
    when = "then, when its turn had come" if again else "chosen"
    yield f"{when}: {first}, {choice.reason}: {WHY.get(choice.reason, choice.reason)}"
    by = "an affinity id" if choice.by_affinity else (
        f"{choice.key_depth} of {choice.key_blocks} text blocks, hot set {choice.hot_version}"
    )  # fmt: skip
    yield (
        f"key: {by}; {choice.text_bytes} bytes of prompt; a region is full above "
        f"{choice.bound_s:.2f} s of work"
    )
    if len(choice.order) > 1:
        yield f"after it: {', '.join(choice.order[1:])}"
    table = [HEADS] + [
        (
            one.region,
            one.standing,
            _ms(one.round_trip_s),
            _ms(one.wait_s),
            _ms(one.read_s),
            _ms(one.total_s),
            _ms(one.cost_s),
            f"{one.held_tokens:.0f} tokens",
            f"{one.work_s:.2f} s",
        )
        for one in choice.weighed
    ]
    yield from (f"  {line}" for line in aligned(table, 2))


def _tried(one: Try) -> Iterator[str]:
    nodes = " → ".join(name for name in (one.prefill, one.decode) if name)
    placed = f" on {nodes} ({one.node_reason or 'no reason told'})" if nodes else ""
    outcome = one.outcome or "running"
    yield f"tried {one.region} at {_ms(one.began_s)}, {one.reason}{placed}: {outcome}"
    if one.node_reason in WHY_NODES:
        yield f"  {one.node_reason}: {WHY_NODES[one.node_reason]}"
    if one.placing is not None:
        yield from (f"  {line}" for line in _placing(one.placing))


def _placing(placing: Placing) -> Iterator[str]:
    pulled = f", {placing.pulled_tokens} from {placing.pulled_from}" if placing.pulled_from else ""
    yield (
        f"tokens: {placing.held_tokens} held where it was read ({placing.reusable_tokens} at most"
        f" anywhere){pulled}, {placing.compute_tokens} computed"
    )
    if placing.alone_s is not None and placing.split_s is not None:
        yield (
            f"lost by all who wait: {_ms(placing.alone_s)} if the decode node read it,"
            f" {_ms(placing.split_s)} if it is split off"
        )


def _bar(step: Step, total_s: float) -> str:
    inside = step.name is StepName.TRANSFER
    scale = BAR / total_s if total_s > 0 else 0.0
    start = min(BAR - 1, round(step.start_s * scale))
    length = max(1, min(BAR - start, round(step.seconds * scale)))
    bar = (" " * start + ("░" if inside else "█") * length).ljust(BAR)
    name = f"  {step.name}" if inside else str(step.name)
    return f"  {name:<15}{_ms(step.seconds):>11}  {bar}  {step.note}".rstrip()


def _ms(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:.1f} s"
    return f"{seconds * 1000:.1f} ms" if seconds < 0.0995 else f"{seconds * 1000:.0f} ms"
