"""`python -m tests.fake_modal`: the fake as a process of its own, until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import signal
import sys
import tempfile
from pathlib import Path

from tests.fake_modal.cloud import Settings
from tests.fake_modal.engine import Engine
from tests.fake_modal.fake import client_env


def raise_file_limit() -> None:
    """500 sandboxes with a running command each hold about 4,500 descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def serve(arguments: argparse.Namespace) -> int:
    settings = Settings(**json.loads(arguments.settings))
    engine = Engine(
        Path(tempfile.mkdtemp(prefix="fake-modal-", dir=arguments.folder)), arguments.mode, settings
    )
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
    parser.add_argument(
        "--folder", type=Path, help="where its files go; a tmpfs is faster (default: temporary)"
    )
    parser.add_argument("--settings", default="{}", help="JSON object of settings, see cloud.Settings")
    parser.add_argument(
        "--print-env", action="store_true", help="print the client's variables, then an empty line"
    )
    raise_file_limit()
    return asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
