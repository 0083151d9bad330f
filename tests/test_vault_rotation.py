"""A secret gets a new value while an experiment runs on Modal, and the daemon is replaced meanwhile."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import anyio
import pytest

pytest.importorskip("modal")

from evalpurse.budget.accounts import Role
from evalpurse.home import Home
from evalpurse.runs.sandboxes.secret_values import secret_values
from evalpurse.runs.services import Services
from tests.lab_fixtures import make_repository, request
from tests.modal_lab import fake_modal, furnish, modal_services, rows_of

pytestmark = pytest.mark.anyio
OLD, NEW = "sk-old/9+Zq=ab cd?", "sk-new/7+Yp=xy zw?"
RUN = (
    'printf %s "$API_KEY" | sha256sum | cut -c1-64 > "$EVALPURSE_OUT/answer.txt"; sleep 3; '
    'echo "key: $API_KEY"; printf %s "user:$API_KEY" | base64; '
    'printf \'{"usage": []}\' > "$EVALPURSE_OUT/metrics.json"'
)


async def started(services: Services) -> None:
    while not any(sandbox.started for sandbox in services.modal.live):  # noqa: ASYNC110 (no event)
        await anyio.sleep(0.02)


async def test_runs_before_and_after_have_their_own_value_and_no_output_has_either(
    home: Home, tmp_path: Path
) -> None:
    vault = tmp_path / "vault.json"
    vault.write_text(json.dumps({"API_KEY": OLD}))
    settings: dict[str, Any] = {
        "vault_command": ("cat", str(vault)),
        "synced_secrets": ("API_KEY",),
        "backend": "modal",
    }
    repository = make_repository(tmp_path / "harness")
    with anyio.fail_after(60):
        async with fake_modal() as fake:
            async with modal_services(home, **settings) as services:
                await services.vault.sync()
                await furnish(services, repository, cases=2, variants=("base",), run=RUN, secrets=["API_KEY"])
                launched = await services.experiments.launch(
                    request(backend="modal", repeats=1, variants=("base",), max_parallel=1), by=Role.AGENT
                )
                await started(services)
                vault.write_text(json.dumps({"API_KEY": NEW}))
                assert (await services.vault.sync()).changed == ("API_KEY",)
                assert secret_values(home, ["API_KEY"]) == {"API_KEY": [NEW, OLD]}
            assert fake.live == 1, "the first run goes on, with the old value"
            async with modal_services(home, **settings) as services:
                experiment_id = launched.status.experiment_id
                status = await services.experiments.wait(experiment_id, 30)
                assert status.ended == {"scored": 2}, status.note
                rows = await rows_of(services, experiment_id)
                get = services.store.blobs.get
                answers = [get(row["answer_blob"]).decode().strip() for row in rows]
                assert answers == [hashlib.sha256(value.encode()).hexdigest() for value in (OLD, NEW)]
                for row in rows:
                    log = get(row["log_blob"])
                    assert log.startswith(b"key: [secret API_KEY]\n")
                    forms = [OLD, NEW, *(_core(value) for value in (OLD, NEW))]
                    assert not any(form.encode() in log for form in forms)
                await services.vault.sync()
                assert secret_values(home, ["API_KEY"]) == {"API_KEY": [NEW]}, "nothing can print the old one"


def _core(value: str) -> str:
    """What every base64 of `user:VALUE` has in the middle."""
    return base64.b64encode(f"user:{value}".encode()).decode()[8:-4]
