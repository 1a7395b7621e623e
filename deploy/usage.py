"""`skerry usage`: what tenants used and what it costs, from the ledger in the state folder."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import TextIO

from core.config import Model, World
from core.config_tenants import Price
from core.errors import ConfigError
from core.usage import UsageReader, UsageRecord
from deploy.tenants import By

COLUMNS = (
    "requests", "prompt_tokens", "cached_tokens", "completion_tokens", "cost",
    "unfinished", "unfinished_prompt_tokens", "unfinished_completion_tokens",
)  # fmt: skip
_DAY = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"


@dataclass(slots=True)
class Sum:
    """The first five are of answers whose usage was sent; the others of requests that broke off,
    with what had been delivered of them. Those cost nothing."""

    requests: int = 0
    prompt: int = 0
    cached: int = 0
    completion: int = 0
    cost: Decimal = Decimal(0)
    unfinished: int = 0
    unfinished_prompt: int = 0
    unfinished_completion: int = 0

    def add(self, record: UsageRecord, price: Price) -> None:
        if record.complete:
            self.requests += 1
            self.prompt += record.prompt
            self.cached += record.cached
            self.completion += record.completion
            self.cost += price.of(record.usage)
        else:
            self.unfinished += 1
            self.unfinished_prompt += record.prompt
            self.unfinished_completion += record.completion

    def row(self) -> list[str]:
        return [
            str(self.requests), str(self.prompt), str(self.cached), str(self.completion),
            plain(self.cost), str(self.unfinished), str(self.unfinished_prompt),
            str(self.unfinished_completion),
        ]  # fmt: skip


def show(world: World, by: By, *, as_csv: bool, since: str, until: str) -> None:
    """Print the sums; days are YYYY-MM-DD or empty. Raises ConfigError."""
    folder = world.state / "usage"
    if not world.state.is_dir():
        raise ConfigError(f"{world.state}: no such folder, so nothing was used there; see --state")
    if not folder.is_dir():
        print(f"{folder}: no request has been recorded yet", file=sys.stderr)
    days = {"since": _day(since), "until": _day(until)}
    reader = UsageReader()
    records = reader.read(folder, **{name: day for name, day in days.items() if day})
    sums = add_up(records, by, world.topology.models)
    if as_csv:
        write_csv(sums, by, sys.stdout)
    else:
        write_table(sums, by, world.topology.currency, sys.stdout)
    free = sorted({r.model for r in records} - _priced(world.topology.models))
    if free:
        print(f"no price in {world.path}: {', '.join(free)}", file=sys.stderr)
    if reader.torn:
        print(f"{reader.torn} torn lines are skipped", file=sys.stderr)


def add_up(records: Iterable[UsageRecord], by: By, models: Mapping[str, Model]) -> dict[str, Sum]:
    """By key, in the keys' order."""
    key_of: Mapping[By, Callable[[UsageRecord], str]] = {
        By.TENANT: lambda record: record.tenant,
        By.MODEL: lambda record: record.model,
        By.DAY: lambda record: record.day,
        By.WORKER: lambda record: record.worker or "-",
    }
    sums: dict[str, Sum] = {}
    for record in records:
        model = models.get(record.model)
        price = model.price if model is not None and model.price is not None else Price()
        sums.setdefault(key_of[by](record), Sum()).add(record, price)
    return dict(sorted(sums.items()))


def write_csv(sums: Mapping[str, Sum], by: By, out: TextIO) -> None:
    """No line of totals: who adds the column up should not count twice."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([by.value, *COLUMNS])
    writer.writerows([key, *total.row()] for key, total in sums.items())


def write_table(sums: Mapping[str, Sum], by: By, currency: str, out: TextIO) -> None:
    heads = (by.value, "requests", "prompt", "cached", "completion", currency, "unfinished")
    rows = [heads, *((key, *total.row()[:6]) for key, total in sums.items())]
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    for row in rows:
        first, *others = (cell.ljust(widths[0]) if i == 0 else cell.rjust(widths[i] + 2)
                          for i, cell in enumerate(row))  # fmt: skip
        out.write("".join([first, *others]).rstrip() + "\n")


def plain(amount: Decimal) -> str:
    """All its digits, none that say nothing."""
    text = format(amount, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def _priced(models: Mapping[str, Model]) -> set[str]:
    return {name for name, model in models.items() if model.price is not None}


def _day(given: str) -> str:
    if given and not re.fullmatch(_DAY, given):
        raise ConfigError(f"{given!r} is no day; write YYYY-MM-DD")
    return given
