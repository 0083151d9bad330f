"""The generated protocol modules of the `modal` client, as `Any`, and the few words that every part needs.

The client ships type stubs for its messages, but they need the stubs of protobuf itself and give every enum
a type of its own. Test code gains nothing from either: the protocol is untyped on purpose, in this file only.
"""

from __future__ import annotations

import base64
import hmac
import importlib
import json
import secrets
import time
from hashlib import sha256
from typing import Any

from grpclib import GRPCError, Status

api: Any = importlib.import_module("modal_proto.api_pb2")
router_pb: Any = importlib.import_module("modal_proto.task_command_router_pb2")
api_grpc: Any = importlib.import_module("modal_proto.api_grpc")
router_grpc: Any = importlib.import_module("modal_proto.task_command_router_grpc")
Empty: Any = importlib.import_module("google.protobuf.empty_pb2").Empty

ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def new_id(prefix: str) -> str:
    """An id in the shape of the real service: prefix and 22 base62 characters."""
    return prefix + "-" + "".join(secrets.choice(ALPHABET) for _ in range(22))


def not_found(message: str) -> GRPCError:
    return GRPCError(Status.NOT_FOUND, message)


def invalid(message: str) -> GRPCError:
    return GRPCError(Status.INVALID_ARGUMENT, message)


def unimplemented(message: str) -> GRPCError:
    return GRPCError(Status.UNIMPLEMENTED, message)


def conflict(message: str) -> GRPCError:
    return GRPCError(Status.FAILED_PRECONDITION, message)


def exists(message: str) -> GRPCError:
    return GRPCError(Status.ALREADY_EXISTS, message)


class Tokens:
    """Signs and checks the two kinds of JWT that the service hands out."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(16)

    def issue(self, subject: str, lifetime_s: float) -> str:
        claims = {"sub": subject, "exp": time.time() + lifetime_s}
        payload = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
        return f"e30.{payload}.{self._sign(payload)}"

    def valid_for(self, token: str, subject: str) -> bool:
        parts = token.split(".")
        if len(parts) != 3 or not hmac.compare_digest(parts[2], self._sign(parts[1])):
            return False
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        return bool(claims["sub"] == subject and claims["exp"] > time.time())

    def revoke_all(self) -> None:
        """Makes every token issued so far worthless."""
        self._key = secrets.token_bytes(16)

    def _sign(self, payload: str) -> str:
        return hmac.new(self._key, payload.encode(), sha256).hexdigest()[:32]
