"""Listening sockets of a process that is short of something."""

from __future__ import annotations

import os
import socket


class Failing(socket.socket):
    """`accept` fails so many times before it does its work; the one who came stays in the queue."""

    number = 0
    times = 0
    failed = 0

    @classmethod
    def on_loopback(cls, number: int, times: int) -> Failing:
        return cls.of(socket.create_server(("127.0.0.1", 0)), number, times)

    @classmethod
    def of(cls, listener: socket.socket, number: int, times: int) -> Failing:
        """In the place of `listener`, which is taken apart."""
        failing = cls(listener.family, listener.type, listener.proto, listener.detach())
        failing.number, failing.times = number, times
        return failing

    def accept(self) -> tuple[socket.socket, object]:
        if self.failed < self.times:
            self.failed += 1
            raise OSError(self.number, os.strerror(self.number))
        return super().accept()
