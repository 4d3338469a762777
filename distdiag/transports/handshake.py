"""How the two ends of a connection show one another that they hold the same key.

The key never travels over the connection. Each end draws a number that it uses once and sends it;
the other end answers with a digest of both numbers, of what it says of itself and of the key. What
somebody else has heard is therefore of no use in another connection, and who listens at the
reporter's address without being the reporter cannot order anything.

The key is made of two parts: the token, which the reporter draws for each attempt and which the
other nodes get from the job's store, and the secret that the user may have given to all nodes.
Whoever can read the job's store knows the token; nobody learns the secret from it.
"""

import hmac
import os
import secrets
from collections.abc import Mapping
from typing import Final

import msgspec

SECRET: Final = "DISTDIAG_SECRET"
"""The variable of the environment that holds the user's secret, the same on all nodes."""
NONCE_BYTES: Final = 16
"""128 bits: no number is drawn twice."""
_DIGEST: Final = "sha256"


class Key:
    """What both ends hold."""

    def __init__(self, token: str, environ: Mapping[str, str] = os.environ) -> None:
        """Make it of the attempt's token and of the user's secret, if there is one."""
        secret = os.fsencode(environ.get(SECRET, ""))
        self._key = hmac.digest(secret, token.encode("utf-8", "backslashreplace"), _DIGEST)

    def proof(self, role: str, *said: object) -> bytes:
        """Return what only a holder of the key can say; `role` tells the two ends apart."""
        return hmac.digest(self._key, msgspec.msgpack.encode((role, said)), _DIGEST)


def nonce() -> bytes:
    """Return a number that is used once."""
    return secrets.token_bytes(NONCE_BYTES)
