"""`evalpurse doctor --modal`: what of a Modal account works from here, and how to mend what does not.

It reads and changes nothing: `evalpurse smoke --modal` is what tries sandboxes. Loads the client, so `doctor`
runs it as a process of its own, which prints its checks as JSON.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import anyio

from evalpurse.config import Settings
from evalpurse.errors import EvalpurseError
from evalpurse.home import Home
from evalpurse.server.doctor import Check

STEP_S = 30.0
MODAL_MIN = (1, 6)
SMOKE = "Then try sandboxes with: evalpurse smoke --modal --max-usd 0.50"


def examine(home: Home) -> list[Check]:
    """All checks in order; what stands on one that failed is not tried."""
    package = _package()
    if package.state == "fail":
        return [package]
    return [package, *anyio.run(_examine, home)]


def _package() -> Check:
    install = "pip install 'evalpurse[modal]' into the environment of evalpurse, then evalpurse daemon stop"
    try:
        found = version("modal")
        import modal  # noqa: F401 (an installed package may still not load)
    except PackageNotFoundError:
        return Check("modal package", "fail", "modal is not installed", install)
    except ImportError as error:
        return Check("modal package", "fail", f"modal {found} does not load: {error}", install)
    if tuple(int(part) for part in found.split(".")[:2]) < MODAL_MIN:
        return Check("modal package", "fail", f"modal {found} is too old", f"{install} (1.6 or newer)")
    return Check("modal package", "ok", f"modal {found}")


async def _examine(home: Home) -> list[Check]:
    from evalpurse.runs.sandboxes import modal_client

    checks: list[Check] = []
    try:
        settings = Settings.load(home.config_file)
        modal_client.credentials(home)
        checks.append(Check("modal credentials", "ok", _where(home)))
        client = await modal_client.connect(home)
    except EvalpurseError as error:
        name = "modal token" if checks else "modal credentials"
        return [*checks, Check(name, "fail", error.message, error.hint)]
    checks.append(Check("modal token", "ok", "accepted"))
    steps: list[tuple[str, Callable[[Any, Home, Settings], Awaitable[Check]]]] = [
        ("modal environment", _environment),
        ("modal volumes", _volumes),
        ("modal rates", _rates),
        ("modal secrets", _secrets),
    ]
    try:
        for name, step in steps:
            checks.append(await _step(name, step, client, home, settings))
            if name == "modal environment" and checks[-1].state == "fail":
                break
    finally:
        await client.close.aio()
    return checks


async def _step(
    name: str,
    step: Callable[[Any, Home, Settings], Awaitable[Check]],
    client: Any,
    home: Home,
    settings: Settings,
) -> Check:
    from evalpurse.runs.sandboxes.modal_client import is_client_error

    try:
        with anyio.fail_after(STEP_S):
            return await step(client, home, settings)
    except TimeoutError:
        return Check(name, "fail", f"no answer within {STEP_S:g} s", "Look at status.modal.com.")
    except Exception as error:
        if not is_client_error(error):
            raise
        mend = "Ask an owner of the workspace for the permission, or use another token."
        return Check(name, "fail", f"{type(error).__name__}: {error}", mend)


def _where(home: Home) -> str:
    """Where the credentials come from, by the order in which `credentials` looks."""
    from evalpurse.runs.sandboxes.modal_client import load

    file = home.path / "modal.toml"
    if file.exists():
        return str(file)
    if os.environ.get("MODAL_TOKEN_ID"):
        return "MODAL_TOKEN_ID of this shell; a daemon that was started elsewhere may not have it"
    config = load().config
    return f"{config.user_config_path}, profile {config._profile}"  # noqa: SLF001 (told by nothing else)


async def _environment(client: Any, _home: Home, settings: Settings) -> Check:
    import modal

    name = settings.modal_environment
    shown = name or "the default environment"
    try:
        # Any listing resolves the environment; secrets are few.
        await modal.Secret.objects.list.aio(max_objects=1, environment_name=name, client=client)
    except modal.exception.NotFoundError as error:
        mend = f"modal environment create {name}, or change modal_environment in config.toml"
        return Check("modal environment", "fail", f"{shown}: {error}", mend)
    return Check("modal environment", "ok", shown)


async def _volumes(client: Any, _home: Home, settings: Settings) -> Check:
    import modal

    found = await modal.Volume.objects.list.aio(
        max_objects=1, environment_name=settings.modal_environment, client=client
    )
    return Check("modal volumes", "ok", "can be listed" if found else "can be listed; there are none yet")


async def _rates(client: Any, _home: Home, settings: Settings) -> Check:
    import modal

    from evalpurse.runs.sandboxes.modal_client import is_client_error
    from evalpurse.runs.sandboxes.modal_rates import Rates
    from evalpurse.runs.sandboxes.protocol import Machine

    def hour(rates: Rates) -> str:
        per_s = rates.nusd_per_second(Machine(), cpu=settings.modal_cpu, memory_mb=settings.modal_memory_mb)
        usd = math.ceil(per_s * 3600) / 10**9
        return f"{settings.modal_cpu:g} cores and {settings.modal_memory_mb} MiB cost ${usd:.4f} an hour"

    try:
        workspace = modal.Workspace.from_context(client=client)
        rates = Rates.live(dict(await workspace.billing.rates.aio()))
    except Exception as error:
        if not is_client_error(error):
            raise
        table = Rates.table()
        mend = "Holds use the list; compare it with the prices of your plan."
        found = f"not readable ({error}); by the {table.source}, {hour(table)}"
        return Check("modal rates", "warn", found, mend)
    return Check("modal rates", "ok", hour(rates))


async def _secrets(client: Any, home: Home, settings: Settings) -> Check:
    import modal

    from evalpurse.runs.sandboxes.secret_values import modal_secret_name

    home_id = home.identity() if (home.path / "identity").exists() else ""
    wanted = [item.partition("=")[0] for item in settings.synced_secrets]
    missing = []
    for name in wanted:
        secret = modal.Secret.from_name(
            modal_secret_name(home_id, name),
            environment_name=settings.modal_environment or None,
            required_keys=[name],
            client=client,
        )
        try:
            await secret.hydrate.aio(client)
        except modal.exception.NotFoundError:
            missing.append(name)
    if missing:
        return Check("modal secrets", "warn", f"not in Modal: {', '.join(missing)}", "evalpurse secrets sync")
    if not wanted:
        return Check("modal secrets", "ok", f"can be listed; none is named in synced_secrets. {SMOKE}")
    return Check("modal secrets", "ok", f"{', '.join(wanted)} are in Modal. {SMOKE}")


if __name__ == "__main__":
    print(json.dumps([asdict(check) for check in examine(Home(Path(sys.argv[1])))]))
