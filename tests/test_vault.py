"""Secrets come from the owner's vault to where runs find them, and their values nowhere else."""

from __future__ import annotations

import base64
import json
import logging
import os
import stat
import sys
import urllib.parse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from evalpurse.budget.accounts import Hold, Role
from evalpurse.budget.ledger import Ledger
from evalpurse.budget.money import NUSD_PER_USD
from evalpurse.config import ConfigError, Settings
from evalpurse.home import Home
from evalpurse.runs.sandboxes.redaction import Redactor
from evalpurse.runs.sandboxes.secret_values import (
    announce,
    modal_secret_name,
    present_value,
    put_in_place,
    secret_values,
)
from evalpurse.runs.vault import ModalSecretError, Vault, VaultError
from evalpurse.store.database import Store

pytestmark = pytest.mark.anyio
PRINT_A_FILE = "import sys; print(open(sys.argv[1]).read())"
OLD, NEW = "sk-old/9+Zq=ab cd?", "sk-new/7+Yp=xy zw?"


@dataclass
class Bed:
    """A home with store and ledger, and a vault command that prints a file."""

    home: Home
    store: Store
    ledger: Ledger
    file: Path

    def vault(self, **settings: Any) -> Vault:
        chosen: dict[str, Any] = {
            "vault_command": (sys.executable, "-c", PRINT_A_FILE, str(self.file)),
            "synced_secrets": ("API_KEY",),
        }
        connect = settings.pop("connect", None)
        return Vault(self.home, Settings(**(chosen | settings)), self.store, self.ledger, connect)

    def put(self, **values: Any) -> None:
        self.file.write_text(json.dumps(values))

    async def events(self) -> list[tuple[str, str]]:
        rows = await self.store.fetch("secret_syncs", count=10)
        return [(row["step"], row["detail"]) for row in reversed(rows)]


@asynccontextmanager
async def laid(home: Home, tmp_path: Path) -> AsyncIterator[Bed]:
    store = await Store.open(home)
    ledger = await Ledger.open(home.ledger_file)
    try:
        yield Bed(home, store, ledger, tmp_path / "vault.json")
    finally:
        await ledger.close_ledger()
        await store.close()


@pytest.fixture
async def bed(home: Home, tmp_path: Path) -> AsyncIterator[Bed]:
    async with laid(home, tmp_path) as made:
        yield made


async def test_only_named_secrets_come_and_in_private_files(bed: Bed) -> None:
    bed.put(API_KEY=OLD, OTHER="not-wanted-here", **{"prod/db": "postgres://db"})
    done = await bed.vault(synced_secrets=("API_KEY", "DB_URL=prod/db")).sync()
    assert (done.names, done.changed, done.in_modal) == (("API_KEY", "DB_URL"), ("API_KEY", "DB_URL"), ())
    files = [file for file in bed.home.secrets.iterdir() if file.is_file()]
    assert {file.name: file.read_text() for file in files} == {"API_KEY": OLD, "DB_URL": "postgres://db"}
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    again = await bed.vault(synced_secrets=("API_KEY", "DB_URL=prod/db")).sync()
    assert again.changed == ()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("echo sk-leak-1; exit 7", "exit code 7"),
        ("echo sk-leak-1 >&2; exit 3", "exit code 3"),
        ('echo \'{"API_KEY": "sk-leak-1\'', "not one JSON object"),
        ("echo '[\"sk-leak-1\"]'", "not one JSON object"),
        ('echo \'{"WRONG": "sk-leak-1"}\'', "The vault has no API_KEY; it gave 1 names"),
        ('echo \'{"API_KEY": ["sk-leak-1"]}\'', "is a list, not a text"),
        ('echo \'{"API_KEY": "", "x": "sk-leak-1"}\'', "is empty"),
        ('printf \'{"API_KEY": "%070000d"}\' 7', "longer than 65536 bytes"),
        ("yes sk-leak-1", "more than 1048576 bytes"),
        (("/no/such/program", "sk"), "cannot be run: No such file"),
    ],
    ids=lambda value: str(value)[:24],
)
async def test_a_vault_that_fails_changes_nothing_and_shows_no_value(
    bed: Bed, command: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    put_in_place(bed.home, "API_KEY", OLD)
    caplog.set_level(logging.DEBUG)
    with anyio.fail_after(20), pytest.raises(VaultError) as caught:
        await bed.vault(vault_command=command).sync()
    assert words in caught.value.message
    assert caught.value.hint
    assert present_value(bed.home, "API_KEY") == OLD
    [(step, detail)] = await bed.events()
    assert step == "secrets_sync_failed"
    told = [str(caught.value), repr(caught.value.facts), detail, caplog.text, repr(caught.value.__cause__)]
    assert not any("sk-leak" in text or OLD in text for text in told)


async def test_a_vault_that_hangs_is_stopped_with_its_children(bed: Bed, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    vault = bed.vault(vault_command=f"sleep 71.25 & echo $! > {pid_file}; wait", vault_timeout_s=1.0)
    with anyio.fail_after(10), pytest.raises(VaultError, match="did not end within 1 s"):
        await vault.sync()
    pid = int(pid_file.read_text())
    with anyio.fail_after(5):
        while _runs(pid):  # noqa: ASYNC110 - the kernel offers no event for somebody else's process
            await anyio.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False


async def test_a_list_is_run_without_a_shell_and_sees_no_keys_of_the_daemon(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODAL_TOKEN_SECRET", "of-the-daemon")
    script = "import json, os, sys; print(json.dumps({'API_KEY': sys.argv[1], 'E': sorted(os.environ)}))"
    await bed.vault(vault_command=(sys.executable, "-c", script, "$(id) > x")).sync()
    assert present_value(bed.home, "API_KEY") == "$(id) > x"
    with pytest.raises(VaultError, match="The vault has no MODAL_TOKEN_SECRET"):
        await bed.vault(
            vault_command=(sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"),
            synced_secrets=("MODAL_TOKEN_SECRET",),
        ).sync()


@pytest.mark.parametrize("named", [(), ("not a name",), ("EVALPURSE_CASE",), ("A", "A=b"), ("=x",)])
async def test_names_that_cannot_be_synced_are_refused(bed: Bed, named: tuple[str, ...]) -> None:
    with pytest.raises(VaultError, match="synced"):
        await bed.vault(synced_secrets=named).sync()


async def test_without_a_vault_the_homes_own_secrets_are_taken(bed: Bed) -> None:
    vault = bed.vault(vault_command="")
    with pytest.raises(VaultError, match="the home folder has no API_KEY"):
        await vault.sync()
    put_in_place(bed.home, "API_KEY", OLD)
    assert (await vault.sync()).names == ("API_KEY",)


async def test_the_store_has_when_and_which_names_and_never_a_value(bed: Bed) -> None:
    bed.put(API_KEY=OLD)
    await bed.vault().sync()
    bed.put(API_KEY=NEW)
    await bed.vault().sync()
    assert await bed.events() == [("secrets_synced", "API_KEY (1 changed; 0 in Modal)")] * 2
    await bed.store.close()
    outside = [file for file in bed.home.path.rglob("*") if file.is_file()]
    for file in outside:
        if bed.home.secrets not in file.parents:
            content = file.read_bytes()
            assert OLD.encode() not in content, file
            assert NEW.encode() not in content, file


async def test_a_former_value_is_redacted_until_the_runs_that_may_print_it_have_ended(bed: Bed) -> None:
    await bed.ledger.set_limit("grant", "workspace", NUSD_PER_USD, by=Role.OWNER)
    bed.put(API_KEY=OLD)
    vault = bed.vault()
    await vault.sync()
    await bed.ledger.hold(Hold("exp.1.1", "workspace", 1))
    bed.put(API_KEY=NEW)
    await vault.sync()
    assert secret_values(bed.home, ["API_KEY"]) == {"API_KEY": [NEW, OLD]}
    redactor = Redactor(secret_values(bed.home, ["API_KEY"]))
    for value in (OLD, NEW):
        for form in (
            value,
            base64.b64encode(b"x" + value.encode()).decode(),
            urllib.parse.quote(value, safe=""),
        ):
            assert "[secret API_KEY]" in redactor.redact_text(f"it is {form}!")
    await bed.ledger.hold(Hold("exp.2.1", "workspace", 1))
    await vault.sync()
    assert secret_values(bed.home, ["API_KEY"]) == {"API_KEY": [NEW, OLD]}, "exp.1.1 still runs"
    await bed.ledger.settle("exp.1.1", 1)
    await vault.sync()
    assert secret_values(bed.home, ["API_KEY"]) == {"API_KEY": [NEW]}, "exp.2.1 was never given the old one"


async def test_a_value_that_was_announced_is_known_whatever_becomes_of_it(bed: Bed) -> None:
    put_in_place(bed.home, "API_KEY", OLD)
    announce(bed.home, "API_KEY", "handed-out-1")
    announce(bed.home, "API_KEY", "handed-out-1")
    await bed.vault(vault_command="").sync()
    assert secret_values(bed.home, ["API_KEY"]) == {"API_KEY": [OLD, "handed-out-1"]}
    put_in_place(bed.home, "API_KEY", NEW)
    assert set(secret_values(bed.home, ["API_KEY"])["API_KEY"]) == {NEW, OLD, "handed-out-1"}
    await bed.vault(vault_command="").sync()
    assert secret_values(bed.home, ["API_KEY"]) == {"API_KEY": [NEW]}


async def test_the_schedule_syncs_and_outlives_a_failure(bed: Bed, caplog: pytest.LogCaptureFixture) -> None:
    bed.file.write_text("not json")
    vault = bed.vault(secrets_sync_every_s=0.05)
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(vault.run)
            while "secrets were not synced" not in caplog.text:  # noqa: ASYNC110 - a log has no event
                await anyio.sleep(0.01)
            bed.put(API_KEY=NEW)
            while present_value(bed.home, "API_KEY") != NEW:  # noqa: ASYNC110 - nor has a file
                await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()


async def test_a_sync_that_came_due_while_no_daemon_ran_is_done_at_once_and_no_other(bed: Bed) -> None:
    bed.put(API_KEY=OLD)
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bed.vault(secrets_sync_every_s=3600.0).run)
            while present_value(bed.home, "API_KEY") != OLD:  # noqa: ASYNC110 - a file has no event
                await anyio.sleep(0.01)
            while not await bed.events():  # noqa: ASYNC110 - as above
                await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
        bed.put(API_KEY=NEW)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bed.vault(secrets_sync_every_s=3600.0).run)
            await anyio.wait_all_tasks_blocked()
            await anyio.sleep(0.2)
            tasks.cancel_scope.cancel()
    assert present_value(bed.home, "API_KEY") == OLD
    assert len(await bed.events()) == 1


def test_settings_take_a_command_as_a_text_or_a_list(home: Home) -> None:
    home.config_file.write_text('vault_command = ["op", "read"]\nsynced_secrets = ["A", "B=c/d"]\n')
    settings = Settings.load(home.config_file)
    assert (settings.vault_command, settings.synced_secrets) == (("op", "read"), ("A", "B=c/d"))
    for bad in ("synced_secrets = 'A'", "synced_secrets = [1]", "vault_command = [1]", "vault_command = 7"):
        home.config_file.write_text(bad + "\n")
        with pytest.raises(ConfigError, match="must be a"):
            Settings.load(home.config_file)


class TestWithModal:
    """Through the real client, against the fake."""

    async def test_each_secret_becomes_one_of_its_own_and_is_updated(self, bed: Bed) -> None:
        async with modal_bed() as (fake, connect):
            bed.put(API_KEY=OLD, DB="db-password-1", OTHER="not-wanted-here")
            vault = bed.vault(synced_secrets=("API_KEY", "DB"), connect=connect)
            assert (await vault.sync()).in_modal == ("API_KEY", "DB")
            name, other = (modal_secret_name(bed.home.identity(), each) for each in ("API_KEY", "DB"))
            assert fake.secrets() == {name: {"API_KEY": OLD}, other: {"DB": "db-password-1"}}
            bed.put(API_KEY=NEW, DB="db-password-1")
            assert (await vault.sync()).changed == ("API_KEY",)
            assert fake.secrets()[name] == {"API_KEY": NEW}

    async def test_what_modal_refuses_is_told_without_the_value_and_mended_by_the_next_sync(
        self, bed: Bed
    ) -> None:
        async with modal_bed() as (fake, connect):
            bed.put(API_KEY=OLD)
            await bed.vault(connect=connect).sync()
            fake.fail("SecretUpdate", "PERMISSION_DENIED", message=f"you may not set {NEW}")
            bed.put(API_KEY=NEW)
            with pytest.raises(ModalSecretError) as caught:
                await bed.vault(connect=connect).sync()
            assert "API_KEY" in caught.value.message
            assert NEW not in str(caught.value)
            assert NEW not in repr(await bed.events())
            assert present_value(bed.home, "API_KEY") == OLD
            assert secret_values(bed.home, ["API_KEY"])["API_KEY"] == [OLD, NEW], "it may have been set"
            assert (await bed.vault(connect=connect).sync()).changed == ("API_KEY",)
            assert secret_values(bed.home, ["API_KEY"])["API_KEY"] == [NEW]

    async def test_rotation_while_sandboxes_run_reaches_the_new_ones_only(self, bed: Bed) -> None:
        import modal

        async with modal_bed() as (_, connect):
            bed.put(API_KEY=OLD)
            await bed.vault(connect=connect).sync()
            client = await connect()
            app = await modal.App.lookup.aio("exp", client=client, create_if_missing=True)
            image = modal.Image.from_registry("python:3.11")
            await image.build.aio(app)
            name = modal_secret_name(bed.home.identity(), "API_KEY")

            async def made() -> Any:
                return await modal.Sandbox.create.aio(
                    app=app,
                    image=image,
                    client=client,
                    timeout=60,
                    secrets=[modal.Secret.from_name(name, required_keys=["API_KEY"], client=client)],
                )

            async def printed(sandbox: Any) -> str:
                process = await sandbox.exec.aio("sh", "-c", 'printf %s "$API_KEY"')
                return str(await process.stdout.read.aio())

            first = await made()
            bed.put(API_KEY=NEW)
            await bed.vault(connect=connect).sync()
            second = await made()
            assert (await printed(first), await printed(second)) == (OLD, NEW)
            for sandbox in (first, second):
                await sandbox.terminate.aio()


@asynccontextmanager
async def modal_bed() -> AsyncIterator[tuple[Any, Any]]:
    """A fake, and a way to a client of it."""
    modal: Any = pytest.importorskip("modal")
    from tests.fake_modal import FakeModal, client_environment

    async with FakeModal() as fake:
        with client_environment(fake):
            client = await modal.Client.from_credentials.aio("ak-fake", "as-fake")

            async def connect() -> Any:
                return client

            with anyio.fail_after(30):
                try:
                    yield fake, connect
                finally:
                    await client.close.aio()
