"""Message authentication in a store that others may reach: a supervisor accepts only the messages of its own run.

A TCPStore asks nobody who he is. So what supervisors write there carries an HMAC (RFC 2104, SHA-256) under a random
token of the run, over the key and the message; hosts get the token over ssh. A message is checked before it is parsed.
"""

from __future__ import annotations

import hmac
import secrets

_SIZE = 32  # of a SHA-256


def token() -> str:
    """A new one."""
    return secrets.token_hex(16)


def seal(token: str, key: str, message: bytes) -> bytes:
    """`message` as it stands at `key` of the store."""
    return code(token, key, message) + message


def unseal(token: str, key: str, data: bytes) -> bytes | None:
    """The message in `data`, which stood at `key`; None where nobody wrote it there who knows the token."""
    message = data[_SIZE:]
    return message if hmac.compare_digest(data[:_SIZE], code(token, key, message)) else None


def code(token: str, key: str, message: bytes) -> bytes:
    """What only who knows the token can say of `message` at `key`."""
    return hmac.digest(token.encode(), key.encode() + b"\0" + message, "sha256")
