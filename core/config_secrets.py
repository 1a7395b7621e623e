"""Secrets behind the references of a topology: `file:PATH` or `env:NAME`.

A file is relative to the state folder and made at first use, readable by us only; one that others
can read is spoken of (`core.private_files`). A variable must
be set for every process that needs the secret; it is never made. Either way a secret is at least
16 characters of printable ASCII, since it travels in headers.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from core.errors import ConfigError
from core.private_files import warn_if_shared


def split_reference(which: str, reference: str) -> tuple[str, str]:
    """("file", "region.secret") of "file:region.secret". Raises ConfigError."""
    kind, _, rest = reference.partition(":")
    if kind not in ("file", "env") or not rest:
        raise ConfigError(f"secret {which!r}: {reference!r} is neither file:PATH nor env:NAME")
    return kind, rest


def read_secret(which: str, reference: str, state: Path, *, make: bool = True) -> bytes:
    """The secret that `reference` stands for; a file that is missing is made, or an error where
    somebody else has to know the secret too (`make` False). Raises ConfigError."""
    kind, rest = split_reference(which, reference)
    if kind == "file":
        if not make and not (state / rest).exists():
            raise ConfigError(f"secret {which!r}: {state / rest} does not exist")
        return _from_file(state / rest)
    if rest not in os.environ:
        raise ConfigError(f"secret {which!r}: environment variable {rest} is not set")
    return _fit(os.environ[rest], f"environment variable {rest}")


def _from_file(path: Path) -> bytes:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        fresh.touch(mode=0o600)
        fresh.write_text(secrets.token_urlsafe(32), encoding="ascii")
        try:
            path.hardlink_to(fresh)  # the first of several processes wins
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
    warn_if_shared(path)
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    return _fit(text, str(path))


def _fit(text: str, where: str) -> bytes:
    """Raises ConfigError, which does not quote the secret."""
    text = text.strip()
    if len(text) < 16 or not (text.isascii() and text.isprintable()):
        raise ConfigError(f"{where}: a secret needs at least 16 characters, printable ASCII")
    return text.encode()
