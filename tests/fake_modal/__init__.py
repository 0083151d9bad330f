"""A fake Modal on loopback for the unmodified `modal` client: see README.md beside this file."""

from __future__ import annotations

from tests.fake_modal.fake import (
    FakeApi,
    FakeModal,
    FakeModalProcess,
    RemoteFake,
    client_env,
    client_environment,
)

__all__ = ["FakeApi", "FakeModal", "FakeModalProcess", "RemoteFake", "client_env", "client_environment"]
