"""Copies chosen secrets from the owner's vault into the home folder and into Modal Secrets.

Only the names in `synced_secrets` are taken, each into a Modal Secret of its own with that one key. A value
is in private files, in Modal, and in the memory of this process while it is copied: never in the store, a
log, an error, an event or an argument of a process. All are read and checked before any is written.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import signal
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar

import anyio
import anyio.to_thread
from anyio.abc import ByteReceiveStream

from evalpurse.budget.ledger import Ledger
from evalpurse.config import Settings
from evalpurse.errors import EvalpurseError
from evalpurse.home import Home
from evalpurse.runs.sandboxes.redaction import Redactor
from evalpurse.runs.sandboxes.secret_values import (
    announce,
    forget_former,
    modal_secret_name,
    present_value,
    put_in_place,
)
from evalpurse.store.database import Store
from evalpurse.store.errors import StoreError
from evalpurse.store.records import EventRow

log = logging.getLogger(__name__)

VAULT_BYTES_MAX = 1 << 20
SECRET_BYTES_MAX = 65_536
FORGET_EVERY_S = 600.0
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_PASSED_ON = ("HOME", "PATH", "USER", "LOGNAME", "LANG", "LC_ALL", "TMPDIR", "XDG_RUNTIME_DIR")

Connect = Callable[[], Awaitable[Any]]
"""Gives an open `modal.Client`; raises an EvalpurseError when there is none to be had."""


class VaultError(EvalpurseError):
    """The vault command gave nothing that can be used; nothing was changed."""

    code: ClassVar[str] = "vault_failed"


class ModalSecretError(EvalpurseError):
    """Modal did not take a secret; those before it are written."""

    code: ClassVar[str] = "modal_secret_failed"


@dataclass(frozen=True)
class Synced:
    """What a sync did. `changed` have a new value; `skipped` says why Modal was left out."""

    at: datetime
    names: tuple[str, ...]
    changed: tuple[str, ...]
    in_modal: tuple[str, ...]
    skipped: str = ""


class Vault:
    """One home's link to its owner's vault. `connect` is None where there is no Modal."""

    def __init__(
        self, home: Home, settings: Settings, store: Store, ledger: Ledger, connect: Connect | None = None
    ) -> None:
        self._home = home
        self._settings = settings
        self._store = store
        self._ledger = ledger
        self._connect = connect
        self._syncing = anyio.Lock()

    async def sync(self) -> Synced:
        """Reads the vault and writes what was named, once at a time; recorded as an event with names only.

        Raises:
            VaultError: nothing is named, or the command failed, took too long, printed something else than
                the JSON object that is wanted, or lacks a name.
            ModalSecretError: Modal refused; the next sync writes everything again.
            EvalpurseError: as `connect`.
        """
        async with self._syncing:
            try:
                done = await self._sync()
            except EvalpurseError as error:
                await self._record("secrets_sync_failed", f"{error.code}: {error.message}")
                raise
            await self._record("secrets_synced", _described(done))
            await self._forget()
        return done

    async def run(self) -> None:
        """Syncs on the schedule and forgets former values that no sandbox can print any more, for ever.

        The schedule goes on over restarts: a sync that came due while no daemon ran is done at once.
        """
        every_s = self._settings.secrets_sync_every_s
        next_sync = anyio.current_time() + max(0.0, every_s - await self._since_last_s())
        while True:
            waited_s = next_sync - anyio.current_time() if every_s else FORGET_EVERY_S
            await anyio.sleep(min(max(waited_s, 0.0), FORGET_EVERY_S))
            if every_s and anyio.current_time() >= next_sync:
                next_sync = anyio.current_time() + every_s
                try:
                    await self.sync()
                except EvalpurseError as error:
                    log.warning("secrets were not synced: %s", error)
            else:
                async with self._syncing:
                    await self._forget()

    async def _sync(self) -> Synced:
        wanted = _wanted(self._settings.synced_secrets)
        values = await self._read(wanted)
        before = await anyio.to_thread.run_sync(self._present, list(values))
        changed = tuple(name for name in values if before[name] != values[name])
        for name in changed:
            await anyio.to_thread.run_sync(announce, self._home, name, values[name])
        in_modal, skipped = await self._write_to_modal(values)
        # Last: until now new sandboxes were given the old value by the home, from now on both are the new.
        for name in changed:
            await anyio.to_thread.run_sync(put_in_place, self._home, name, values[name])
        return Synced(datetime.now(UTC), tuple(values), changed, in_modal, skipped)

    def _present(self, names: Sequence[str]) -> dict[str, str | None]:
        return {name: present_value(self._home, name) for name in names}

    async def _read(self, wanted: Mapping[str, str]) -> dict[str, str]:
        command = self._settings.vault_command
        if not command:
            found = await anyio.to_thread.run_sync(self._present, list(wanted))
            missing = [name for name, value in found.items() if value is None]
            if missing:
                raise VaultError(
                    f"There is no vault_command, and the home folder has no {', '.join(missing)}.",
                    hint="Name a vault_command in config.toml, or use: evalpurse secrets set NAME",
                    missing=missing,
                )
            return {name: value for name, value in found.items() if value is not None}
        printed = await _output_of(command, self._settings.vault_timeout_s)
        return _chosen(_parsed(printed), wanted)

    async def _write_to_modal(self, values: Mapping[str, str]) -> tuple[tuple[str, ...], str]:
        if self._connect is None:
            return (), "The Modal client is not installed."
        try:
            client = await self._connect()
        except EvalpurseError as error:
            if self._settings.backend == "modal":
                raise
            return (), error.message
        home_id = await anyio.to_thread.run_sync(self._home.identity)
        for name, value in values.items():
            await write_modal_secret(
                client, modal_secret_name(home_id, name), {name: value}, self._settings.modal_environment
            )
        return tuple(values), ""

    async def _since_last_s(self) -> float:
        """Seconds since the last try to sync; infinite when there was none, or none is on record."""
        try:
            rows = await self._store.fetch("secret_syncs", count=1)
        except StoreError as error:
            log.warning("when secrets were synced last cannot be read: %s", error)
            rows = []
        return (datetime.now(UTC) - rows[0]["at"]).total_seconds() if rows else math.inf

    async def _forget(self) -> None:
        seqs = [hold.seq for hold in self._ledger.open_holds()]
        await anyio.to_thread.run_sync(forget_former, self._home, seqs)

    async def _record(self, step: str, detail: str) -> None:
        row = EventRow(datetime.now(UTC), "", "", "", step, detail)
        try:
            await self._store.append([row])
        except StoreError as error:
            log.warning("%s could not be recorded: %s", step, error)


async def write_modal_secret(client: Any, name: str, values: Mapping[str, str], environment: str) -> None:
    """Makes a named Modal Secret, or gives an existing one these values.

    Raises:
        ModalSecretError: Modal's reason, without values.
    """
    import modal  # optional, and slow to load

    where = environment or None
    try:
        try:
            await modal.Secret.objects.create.aio(name, dict(values), environment_name=where, client=client)
        except modal.exception.AlreadyExistsError:
            secret = modal.Secret.from_name(name, environment_name=where, client=client)
            await secret.hydrate.aio(client)
            await secret.update.aio(dict(values))
    except modal.exception.Error as error:
        reason = Redactor(values).redact_text(f"{type(error).__name__}: {error}")
        raise ModalSecretError(
            f"Modal did not take secret {name} ({', '.join(values)}): {reason}",
            hint="See: evalpurse doctor --modal",
        ) from None  # the cause may hold the values


def _wanted(named: Sequence[str]) -> dict[str, str]:
    """Variable name -> name in the vault."""
    wanted: dict[str, str] = {}
    for item in named:
        name, _, key = item.partition("=")
        if not _NAME.fullmatch(name) or name.startswith("EVALPURSE_") or name in wanted:
            raise VaultError(
                f"synced_secrets has {item!r}: {name!r} is not the name of a variable, or is there twice.",
                hint='For example: synced_secrets = ["OPENAI_API_KEY", "DB_URL=prod/db_url"]',
            )
        wanted[name] = key or name
    if not wanted:
        raise VaultError(
            "No secret is named to be synced.",
            hint='Add to config.toml: synced_secrets = ["OPENAI_API_KEY"], then: evalpurse daemon stop',
        )
    return wanted


async def _output_of(command: str | Sequence[str], timeout_s: float) -> bytes:
    """What the vault command printed. Its error output is not read: it may show values."""
    try_it = "Run it by hand, as this user and with only HOME and PATH set, to see what it says."
    try:
        process = await anyio.open_process(
            ["/bin/sh", "-c", command] if isinstance(command, str) else list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _PASSED_ON if name in os.environ},
            start_new_session=True,
        )
    except OSError as error:
        raise VaultError(
            f"The vault command cannot be run: {error.strerror}.", hint="See vault_command in config.toml."
        ) from error
    printed = b""
    try:
        with anyio.move_on_after(timeout_s) as scope:
            printed = await _read_up_to(process.stdout, VAULT_BYTES_MAX)
            await process.wait()
    finally:
        with anyio.CancelScope(shield=True):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.aclose()
    if scope.cancelled_caught:
        raise VaultError(
            f"The vault command did not end within {timeout_s:g} s and was stopped.",
            hint=f"{try_it} It must not ask anything. vault_timeout_s gives it longer.",
        )
    if process.returncode != 0:
        raise VaultError(f"The vault command ended with exit code {process.returncode}.", hint=try_it)
    return printed


async def _read_up_to(stream: ByteReceiveStream | None, most: int) -> bytes:
    read = bytearray()
    if stream is not None:
        async for chunk in stream:
            read += chunk
            if len(read) > most:
                raise VaultError(
                    f"The vault command printed more than {most} bytes.",
                    hint="Let it print only the object with the secrets that are named.",
                )
    return bytes(read)


def _parsed(printed: bytes) -> dict[str, Any]:
    try:
        found = json.loads(printed)
    except (ValueError, RecursionError):
        found = None  # the error would carry what was printed
    if not isinstance(found, dict):
        raise VaultError(
            f"The vault command printed {len(printed)} bytes that are not one JSON object.",
            hint='It should print {"NAME": "value", ...} and nothing else.',
        )
    return found


def _chosen(found: Mapping[str, Any], wanted: Mapping[str, str]) -> dict[str, str]:
    missing = sorted(key for key in wanted.values() if key not in found)
    if missing:
        raise VaultError(
            f"The vault has no {', '.join(missing)}; it gave {len(found)} names.",
            hint="Mend synced_secrets in config.toml, or the vault command.",
            missing=missing,
        )
    for name, key in wanted.items():
        value = found[key].rstrip("\n") if isinstance(found[key], str) else found[key]
        problem = ""
        if not isinstance(value, str):
            problem = f"is a {type(value).__name__}, not a text"
        elif not value or "\0" in value:
            problem = "is empty or has a NUL in it"
        elif len(value.encode("utf-8", "surrogatepass")) > SECRET_BYTES_MAX:
            problem = f"is longer than {SECRET_BYTES_MAX} bytes"
        elif not value.isascii() and value != value.encode("utf-8", "replace").decode():
            problem = "is not valid text"
        if problem:
            raise VaultError(
                f"What the vault has as {key} (for {name}) {problem}.", hint="Mend it in the vault."
            )
    return {name: found[key].rstrip("\n") for name, key in wanted.items()}


def _described(done: Synced) -> str:
    text = f"{', '.join(done.names)} ({len(done.changed)} changed"
    return f"{text}; {len(done.in_modal)} in Modal)"
