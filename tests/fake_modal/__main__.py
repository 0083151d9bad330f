"""`python -m tests.fake_modal`: the fake as a process of its own, until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from pathlib import Path

from tests.fake_modal.cloud import Settings
from tests.fake_modal.engine import Engine
from tests.fake_modal.fake import client_env


async def serve(arguments: argparse.Namespace) -> int:
    settings = Settings(**json.loads(arguments.settings))
    engine = Engine(Path(tempfile.mkdtemp(prefix="fake-modal-")), arguments.mode, settings)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await engine.start(arguments.port)
    if arguments.print_env:
        for name, value in client_env(engine.cloud.url).items():
            print(f"{name}={value}")
    print(f"FAKE_MODAL_HTTP_URL={engine.cloud.http_url}\n", flush=True)
    await stop.wait()
    crashes = engine.admin.crashes()
    await engine.stop()
    for crash in crashes:
        print(crash, file=sys.stderr)
    return 1 if crashes else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fake_modal", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="of gRPC; 0 picks a free one")
    parser.add_argument("--mode", choices=["auto", "bwrap", "plain"], default="auto")
    parser.add_argument("--settings", default="{}", help="JSON object of settings, see cloud.Settings")
    parser.add_argument(
        "--print-env", action="store_true", help="print the client's variables, then an empty line"
    )
    return asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
