"""Lines that stay, and on a terminal one line below them that is drawn again and again."""

from __future__ import annotations

import shutil
from typing import TextIO


class Screen:
    """`say` prints a line above the live one. Without a terminal there is no live line."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self.live = out.isatty()

    def say(self, line: str) -> None:
        self._write(f"\r\x1b[K{line}\n" if self.live else f"{line}\n")

    def draw(self, text: str) -> None:
        """Replace the live line; it is cut to the width of the terminal, since a wrapped line
        could not be taken back."""
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            self._write(f"\r\x1b[K{text if len(text) <= width else text[: width - 1] + '…'}")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
