"""Cron expressions as Cloudflare writes them: five fields, UTC, to the minute. Pure.

Fields: minute, hour, day of the month, month, weekday (1 is Sunday, or names), each `*`, numbers,
ranges, steps and lists of them; `L` is the last day of a month, `5L` the last Thursday. Where days
of the month and weekdays are both given, either of them will do.
"""

from __future__ import annotations

import calendar
import datetime as dt
import re
from dataclasses import dataclass

from core.errors import WorkerRefused

_MONTHS = {name.upper(): n for n, name in enumerate(calendar.month_abbr) if name}
_WEEKDAYS = {name: n for n, name in enumerate(("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"), 1)}
_PART = re.compile(r"(?P<from>\*|\w+)(-(?P<to>\w+))?(/(?P<step>\d+))?")


@dataclass(frozen=True, slots=True)
class Cron:
    """What `read_cron` understood. `last_day`: the last of the month; `last_weekdays`: the last
    such weekday of the month, numbered like `weekdays` from 1 for Sunday."""

    text: str
    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    last_day: bool = False
    last_weekdays: frozenset[int] = frozenset()
    any_day: bool = True
    any_weekday: bool = True

    def due(self, at: dt.datetime) -> bool:
        """Whether it runs in the minute of `at` (UTC)."""
        if (
            at.minute not in self.minutes
            or at.hour not in self.hours
            or at.month not in self.months
        ):
            return False
        last = calendar.monthrange(at.year, at.month)[1]
        weekday = at.isoweekday() % 7 + 1
        day = at.day in self.days or (self.last_day and at.day == last)
        week = weekday in self.weekdays or (weekday in self.last_weekdays and at.day > last - 7)
        if self.any_day or self.any_weekday:
            return (self.any_day or day) and (self.any_weekday or week)
        return day or week


def read_cron(text: str) -> Cron:
    """Raises WorkerRefused."""
    fields = text.split()
    if len(fields) != 5:
        raise _bad(text, "it has five fields: minute, hour, day of the month, month, weekday")
    minute, hour, day, month, weekday = (field.upper() for field in fields)
    last_weekdays = frozenset(
        _number(part[:-1], text, _WEEKDAYS, 1, 7)
        for part in weekday.split(",")
        if part.endswith("L") and part != "L"
    )
    plain_weekday = ",".join(p for p in weekday.split(",") if not p.endswith("L") or p == "L")
    plain_day = ",".join(p for p in day.split(",") if p not in ("L", "?"))
    return Cron(
        text=text,
        minutes=_field(minute, text, {}, 0, 59),
        hours=_field(hour, text, {}, 0, 23),
        days=_field(plain_day, text, {}, 1, 31) if plain_day else frozenset(),
        months=_field(month, text, _MONTHS, 1, 12),
        weekdays=_field(plain_weekday, text, _WEEKDAYS, 1, 7) if plain_weekday else frozenset(),
        last_day="L" in day.split(","),
        last_weekdays=last_weekdays,
        any_day=day in ("*", "?"),
        any_weekday=weekday in ("*", "?"),
    )


def _field(field: str, text: str, names: dict[str, int], low: int, high: int) -> frozenset[int]:
    found: set[int] = set()
    for part in field.replace("?", "*").split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise _bad(text, f"{part!r} is no part of a cron expression")
        step = int(match["step"] or 1)
        if match["from"] == "*":
            first, last = low, high
        else:
            first = _number(match["from"], text, names, low, high)
            last = high if match["step"] else first
            if match["to"] is not None:
                last = _number(match["to"], text, names, low, high)
        if step < 1 or last < first:
            raise _bad(text, f"{part!r} holds no value")
        found.update(range(first, last + 1, step))
    return frozenset(found)


def _number(word: str, text: str, names: dict[str, int], low: int, high: int) -> int:
    value = names.get(word, int(word) if word.isascii() and word.isdigit() else -1)
    if not low <= value <= high:
        raise _bad(text, f"{word!r} is not from {low} to {high}")
    return value


def _bad(text: str, why: str) -> WorkerRefused:
    return WorkerRefused(f"the cron trigger {text[:100]!r} does not fit: {why}", param="crons")
