"""Keys of the disk tier: one for each namespace, from the topology's secret and a random salt.

HKDF-SHA256 over the secret, with the salt of the namespace, which lies beside what it protects: who
erases the salt makes everything unreadable that was written with its key.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

SALT_BYTES = 32
TAG_BYTES = 16
_KEY_BYTES = 32


class Keyring:
    """`secret`: the topology's `secrets.tiers`."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._naming = self._derive(b"", b"names")

    def tag(self, namespace: str) -> bytes:
        """What stands for a namespace outside; tells nothing without the secret."""
        return self.mac(b"namespace\0" + namespace.encode())

    def mac(self, data: bytes) -> bytes:
        return blake2b(
            data, digest_size=TAG_BYTES, key=self._naming, person=b"skerry-tier"
        ).digest()

    def cipher(self, owner: bytes, salt: bytes) -> AESGCM:
        """Authenticates what it encrypts. `owner` is a `tag`."""
        return AESGCM(self._derive(salt, b"blocks\0" + owner))

    def _derive(self, salt: bytes, purpose: bytes) -> bytes:
        hkdf = HKDF(SHA256(), _KEY_BYTES, salt=salt, info=b"skerry tier 1\0" + purpose)
        return hkdf.derive(self._secret)


def new_salt() -> bytes:
    return secrets.token_bytes(SALT_BYTES)
