"""HOST:PORT, as a topology writes it."""

from __future__ import annotations

import ipaddress

from core.errors import ConfigError


def split_address(address: str) -> tuple[str, int]:
    """("127.0.0.1", 8787) of "127.0.0.1:8787". Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    digits = port.isascii() and port.isdigit()  # "²" is a digit too, but no number
    if not colon or not host or not digits or len(port) > 5 or int(port) > 65535:
        raise ConfigError(f"{address!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
