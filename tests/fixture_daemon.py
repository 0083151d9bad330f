"""A real daemon with tools made for tests: the same doors, life and toolbox, and services of two lines.

Run as `python -m tests.fixture_daemon`, as the daemon itself is. Files in the home folder change it:
`pretend_version` its version, `fail_open` makes opening the data fail, `drain_s` how long it drains.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, cast

import anyio
from pydantic import BaseModel, Field

import evalpurse

if __name__ == "__main__":
    pretended = Path(sys.argv[sys.argv.index("--home") + 1]) / "pretend_version"
    if pretended.exists():
        evalpurse.__version__ = pretended.read_text().strip()

from evalpurse.config import Settings
from evalpurse.errors import EvalpurseError
from evalpurse.home import Home
from evalpurse.server.daemon import main
from evalpurse.tools.toolbox import Answer, Call, Toolbox


class SchemaTooNewError(EvalpurseError):
    """What a store says that was written by a later version."""

    code = "schema_too_new"


class FixtureServices:
    """Leaves a trace in the home folder of what happened to it."""

    def __init__(self, home: Home) -> None:
        self.home = home

    async def drain(self) -> None:
        """Takes as long as the home says."""
        (self.home.path / "drained").touch()
        told = self.home.path / "drain_s"
        await anyio.sleep(float(told.read_text()) if told.exists() else 0)


@asynccontextmanager
async def open_services(home: Home, settings: Settings) -> AsyncIterator[FixtureServices]:
    """Opens nothing, or fails as the home says."""
    if (home.path / "fail_open").exists():
        raise SchemaTooNewError("The store has schema 9, this version knows 1.", hint="Update evalpurse.")
    yield FixtureServices(home)
    (home.path / "closed").touch()


class Echo(Answer):
    """What went in, and who asked."""

    text: str
    role: str
    client: str
    door: str


class Done(Answer):
    """Nothing but the end."""

    ok: bool = True


class Word(BaseModel):
    """What a person is asked for."""

    word: str


def register(toolbox: Toolbox) -> None:
    """Tools that do one thing each that a real one does at times."""

    @toolbox.tool(title="Echo", read_only=True, destructive=False, idempotent=True, open_world=False)
    async def echo(call: Call, text: Annotated[str, Field(description="Comes back.")]) -> Echo:
        """Answers what it was told."""
        session = call.session
        return Echo(text=text, role=session.role, client=session.client, door=session.door)

    @toolbox.tool(title="Write", read_only=False, destructive=False, idempotent=True, open_world=False)
    async def touch(call: Call, name: Annotated[str, Field(description="A file name.")]) -> Done:
        """Makes a file in the home folder."""
        (_home(call) / name).touch()
        return Done()

    @toolbox.tool(title="Hang", read_only=True, destructive=False, idempotent=True, open_world=False)
    async def hang(call: Call, name: Annotated[str, Field(description="Names the files.")]) -> Done:
        """Says that it began (a byte in NAME.began, and progress), waits, and says that it was cancelled."""
        with (_home(call) / f"{name}.began").open("a") as began:
            began.write(".")
        await call.progress(0, 1, "began")
        try:
            await anyio.sleep_forever()
        except asyncio.CancelledError:
            (_home(call) / f"{name}.cancelled").touch()
            raise
        return Done()

    @toolbox.tool(title="Ask", read_only=True, destructive=False, idempotent=True, open_world=False)
    async def ask(call: Call) -> Echo:
        """Asks the person behind the client for a word."""
        got = await call.context.elicit("Which word?", Word)
        return Echo(text=got.data.word if got.action == "accept" else "", role="", client="", door="")

    @toolbox.tool(title="Count", read_only=True, destructive=False, idempotent=True, open_world=False)
    async def count(call: Call, to: Annotated[int, Field(description="How far.", ge=0, le=1000)]) -> Done:
        """Counts with progress."""
        for number in range(to):
            await call.progress(number + 1, to, f"step {number + 1}")
        return Done()

    @toolbox.tool(title="Fill", read_only=True, destructive=False, idempotent=True, open_world=False)
    async def fill(call: Call, size: Annotated[int, Field(description="Bytes.", ge=0)]) -> Echo:
        """Answers with a large text."""
        return Echo(text="x" * size, role="", client="", door="")

    @toolbox.tool(title="Fail", read_only=True, destructive=False, idempotent=True, open_world=False)
    async def fail(call: Call) -> Done:
        """Fails in a way that nobody foresaw."""
        raise RuntimeError("the secret is 1234")


def _home(call: Call) -> Path:
    return cast(FixtureServices, call.services).home.path


if __name__ == "__main__":
    sys.exit(main(open_services=open_services, registers=[register]))  # type: ignore[arg-type]
