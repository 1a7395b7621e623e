"""`skerry worker new`: a folder to begin with, made from an example that is tested."""

from __future__ import annotations

import datetime as dt
import os
import re
import shutil
import sys
from pathlib import Path

from core.errors import ConfigError
from edge.workers.bundle import check_name

TEMPLATES = Path(__file__).resolve().parents[2] / "examples" / "workers"
_NAME = re.compile(r'^(\s*"?name"?\s*[:=]\s*)"[^"]*"', re.MULTILINE)
_DATE = re.compile(r'^(\s*"?compatibility_date"?\s*[:=]\s*)"[^"]*"', re.MULTILINE)
NEWEST_DATE = dt.date(2026, 11, 17)
"""The last compatibility date that the pinned workerd knows."""


def create(name: str, template: str) -> None:
    """Raises ConfigError, WorkerRefused."""
    check_name(name)
    source = TEMPLATES / template
    if not TEMPLATES.is_dir():
        raise ConfigError("the examples are no part of this installation; they are in the sources")
    if not source.is_dir():
        known = ", ".join(sorted(path.name for path in TEMPLATES.iterdir() if path.is_dir()))
        raise ConfigError(f"there is no example {template!r}; there are: {known}")
    target = Path(name)
    if target.exists():
        raise ConfigError(f"{target} exists already")
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
    date = min(dt.datetime.now(dt.UTC).date(), NEWEST_DATE)
    for file in target.glob("wrangler.*"):
        text = _NAME.sub(rf'\1"{name}"', file.read_text(encoding="utf-8"), count=1)
        file.write_text(_DATE.sub(rf'\1"{date}"', text, count=1), encoding="utf-8")
    skerry = sys.argv[0]
    if os.sep in skerry:  # the shorter way from there
        skerry = min(os.path.relpath(skerry, target), str(Path(skerry).absolute()), key=len)
    print(f"{target}/ is made from the example {template}. With a world running (`skerry up`):")
    print(f"  cd {target}")
    print(f"  {skerry} worker dev       serves it on one edge, again with each change")
    print(f"  {skerry} worker deploy    serves it on every edge")
