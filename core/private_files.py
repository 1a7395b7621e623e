"""Secrets in files that others than their owner can read, or change, are spoken of: once a process
and file, when it is read for the first time."""

from __future__ import annotations

import logging
import os
import shlex
from pathlib import Path

_log = logging.getLogger("skerry.secrets")

_OTHERS, _GROUP = 0o007, 0o070
_said: set[Path] = set()


def warn_if_shared(path: Path) -> None:
    """Before it is used. A file of somebody else's may be our group's, which is how we read it."""
    try:
        status = path.stat()
    except OSError:
        return  # whoever reads it says so
    ours = status.st_uid == os.geteuid()
    if not status.st_mode & (_OTHERS | _GROUP if ours else _OTHERS) or path in _said:
        return
    _said.add(path)
    also = "" if ours else f" and give it to the user of this process ({os.geteuid()})"
    _log.warning(
        "others than its owner can read or change %s: chmod 600 %s%s",
        path, shlex.quote(str(path)), also,
    )  # fmt: skip
