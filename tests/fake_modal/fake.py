"""The doors to the fake for tests: in a thread of this process, or as a process of its own.

Both have the same methods. They are blocking and quick: what they ask runs on the fake's own event loop, so a
test may call them from any thread, from async code too.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.fake_modal.cloud import ENVIRONMENT, TOKEN_ID, TOKEN_SECRET, Settings
from tests.fake_modal.engine import Engine
from tests.fake_modal.faults import When

REPOSITORY = Path(__file__).resolve().parents[2]
ANSWER_S = 60.0


class FakeApi(ABC):
    """What a test may ask of a fake, wherever it runs."""

    @abstractmethod
    def _ask(self, method: str, **params: Any) -> Any:
        """Carries out a method of `engine.Admin`."""

    @property
    def env(self) -> dict[str, str]:
        """Variables that point an unmodified client at this fake, and away from any real account."""
        return client_env(self.url)

    @property
    def url(self) -> str:
        return str(self._ask("describe")["url"])

    @property
    def mode(self) -> str:
        """`bwrap` or `plain`; `describe()` says why it is not bwrap."""
        return str(self._ask("describe")["mode"])

    def describe(self) -> dict[str, Any]:
        """url, http_url (blocks and remote control), mode, mode_reason, folder."""
        return dict(self._ask("describe"))

    def fail(
        self,
        rpc: str,
        status: str,
        *,
        times: int | None = 1,
        message: str = "injected fault",
        retry_after_s: float | None = None,
        when: When = "before",
        skip: int = 0,
        only: str = "",
    ) -> None:
        """The next `times` calls (None: all) end with this gRPC status.

        `retry_after_s` adds the retry policy that the client obeys without limit. `when="after"`: the call
        takes effect and its answer is lost. `skip`: so many matching calls pass first. `only`: just calls
        that name this sandbox (id, task id, name) or app.
        """
        self._ask(
            "inject", rpc=rpc, status=status, times=times, message=message, retry_after_s=retry_after_s,
            when=when, skip=skip, only=only,
        )  # fmt: skip

    def delay(self, rpc: str, seconds: float, *, times: int | None = None, only: str = "") -> None:
        """Calls wait so long before they are carried out."""
        self._ask("inject", rpc=rpc, delay_s=seconds, times=times, only=only)

    def hang(self, rpc: str, *, times: int | None = None, when: When = "before", only: str = "") -> None:
        """Calls wait until `release(rpc)`."""
        self._ask("inject", rpc=rpc, hang=True, times=times, when=when, only=only)

    def cut(
        self, rpc: str, *, times: int | None = 1, when: When = "before", skip: int = 0, only: str = ""
    ) -> None:
        """The connection that the call came in on is dropped, before or after its effect."""
        self._ask("inject", rpc=rpc, disconnect=True, times=times, when=when, skip=skip, only=only)

    def break_stream(
        self, rpc: str, after_bytes: int, *, status: str = "", disconnect: bool = False,
        times: int | None = 1, only: str = "",
    ) -> None:  # fmt: skip
        """A stream ends after so many bytes: with a status, with its connection, or half-dead (silent, open).

        For TaskExecStdioRead, SandboxStdioReadV2, TaskExecStdinWriteStream, BlockPut and BlockGet.
        """
        self._ask(
            "inject",
            rpc=rpc,
            after_bytes=after_bytes,
            status=status,
            disconnect=disconnect,
            times=times,
            only=only,
        )

    def release(self, rpc: str) -> None:
        """Lets hanging calls of this RPC go on and lifts its faults."""
        self._ask("release", rpc=rpc)

    def clear_faults(self) -> None:
        """Lifts every fault; calls that hang stay until released."""
        self._ask("clear_faults")

    def set(self, **changes: Any) -> None:
        """Changes fields of `Settings` while it runs (`max_streams` applies to new connections only)."""
        self._ask("set", **changes)

    def counts(self) -> dict[str, int]:
        """Calls so far by RPC, with BlockPut, BlockGet and BlobPut beside them."""
        return dict(self._ask("counts"))

    def statuses(self, rpc: str) -> dict[str, int]:
        """How the calls of an RPC ended: by gRPC status name, CANCELLED when the client went away."""
        return dict(self._ask("statuses", rpc=rpc))

    def calls(self, rpc: str = "", *, about: str = "", limit: int = 1000) -> list[dict[str, Any]]:
        """The newest finished calls: rpc, at, duration_s, status, names, metadata (never tokens)."""
        return list(self._ask("calls", rpc=rpc, about=about, limit=limit))

    def wait_calls(
        self, rpc: str, count: int = 1, *, timeout_s: float = 10.0, in_flight: bool = False
    ) -> None:
        """Blocks until an RPC was called so often (or so many calls of it are in flight).

        Raises:
            TimeoutError: they did not come; says how many did.
        """
        self._ask("wait_calls", rpc=rpc, count=count, timeout_s=timeout_s, in_flight=in_flight)

    async def calls_came(
        self, rpc: str, count: int = 1, *, timeout_s: float = 10.0, in_flight: bool = False
    ) -> None:
        """`wait_calls` for async tests."""
        await asyncio.to_thread(self.wait_calls, rpc, count, timeout_s=timeout_s, in_flight=in_flight)

    def sandboxes(self, app: str = "", *, running: bool = False) -> list[dict[str, Any]]:
        """Facts about every sandbox ever made, oldest first; `app` is an id or name."""
        return list(self._ask("sandboxes", app=app, running=running))

    def sandbox(self, reference: str) -> dict[str, Any]:
        """Facts about the newest sandbox with this id, task id or name.

        Raises:
            LookupError: there is none.
        """
        facts: dict[str, Any]
        for facts in reversed(self.sandboxes()):
            if reference in {facts["id"], facts["task_id"], facts["name"]}:
                return facts
        raise LookupError(f"no sandbox is known as '{reference}'")

    @property
    def live(self) -> int:
        return int(self._ask("live")["now"])

    @property
    def peak_live(self) -> int:
        """The most that ever ran at once."""
        return int(self._ask("live")["peak"])

    def end(self, sandbox: str, status: str, exit_code: int | None = None) -> None:
        """Ends a sandbox from outside: TERMINATED, TIMEOUT, INTERNAL_FAILURE, MEMORY_MANAGER_EVICTION, ..."""
        self._ask("end", sandbox=sandbox, status=status, exit_code=exit_code)

    def vanish(self, sandbox: str) -> None:
        """A lost sandbox: its processes are gone and every RPC about it answers NOT_FOUND."""
        self._ask("vanish", sandbox=sandbox)

    def kill_execs(self, sandbox: str) -> int:
        """Kills the running commands as the kernel does when memory is out (137); the sandbox stays."""
        return int(self._ask("kill_execs", sandbox=sandbox))

    def images(self) -> list[dict[str, Any]]:
        """Every image: id, kind, status, builds, base, commands, skipped steps, env, workdir, log."""
        return list(self._ask("images"))

    def volumes(self) -> dict[str, Any]:
        """names, blocks_wanted, blocks_known (deduplicated), received_bytes, files_uploaded (of mounts)."""
        return dict(self._ask("volumes"))

    def secrets(self) -> dict[str, dict[str, str]]:
        """Named secrets with their values."""
        return dict(self._ask("secrets"))

    def put_secret(self, name: str, values: Mapping[str, str], environment: str = ENVIRONMENT) -> None:
        """Makes or replaces a named secret."""
        self._ask("put_secret", name=name, values=dict(values), environment=environment)

    def apps(self) -> list[dict[str, Any]]:
        return list(self._ask("apps"))

    def bill(self) -> dict[str, Any]:
        """The fake's own books: per sandbox seconds, limits, cost_usd as metered, ceiling_usd at limits."""
        bill: dict[str, Any] = self._ask("bill")
        return bill

    def expire_token(self, *, expired: bool = True) -> None:
        """From now on every call is UNAUTHENTICATED (or, with False, no longer)."""
        self._ask("expire_token", expired=expired)

    def revoke_tokens(self) -> None:
        """Makes all JWTs handed out so far worthless; the client must fetch new ones."""
        self._ask("revoke_tokens")

    def drop_connections(self) -> int:
        """Aborts every connection, once."""
        return int(self._ask("drop_connections"))

    def crashes(self) -> list[str]:
        """Tracebacks of handlers that failed: defects of the fake."""
        return list(self._ask("crashes"))


def client_env(url: str) -> dict[str, str]:
    return {
        "MODAL_SERVER_URL": url,
        "MODAL_TOKEN_ID": TOKEN_ID,
        "MODAL_TOKEN_SECRET": TOKEN_SECRET,
        "MODAL_CONFIG_PATH": os.devnull,
        "MODAL_ENVIRONMENT": "",
        "MODAL_DISABLE_API_PROXY": "1",
    }


class FakeModal(FakeApi):
    """A fake in a thread of this process, for `with` and `async with`; `settings` are those of `Settings`."""

    def __init__(
        self, *, mode: str = "auto", port: int = 0, folder: Path | None = None, **settings: Any
    ) -> None:
        self._mode = mode
        self._port = port
        self._parent = folder
        self._settings = Settings(**settings)
        self._loop = asyncio.new_event_loop()
        self._engine: Engine | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake-modal", daemon=True)

    def start(self) -> Self:
        self._thread.start()
        folder = Path(tempfile.mkdtemp(prefix="fake-modal-", dir=self._parent))
        engine = Engine(folder, self._mode, self._settings)
        try:
            self._run(engine.start(self._port))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            self._end_loop()
            raise
        self._engine = engine
        return self

    def close(self) -> None:
        """Ends everything.

        Raises:
            AssertionError: a handler crashed meanwhile: the fake itself is broken.
        """
        crashes = self.crashes()
        try:
            if self._engine is not None:
                self._run(self._engine.stop())
        finally:
            self._end_loop()
        assert not crashes, "\n".join(crashes)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.start)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def _ask(self, method: str, **params: Any) -> Any:
        if self._engine is None:
            raise RuntimeError("the fake is not started")
        return self._run(self._engine.admin.dispatch(method, params))

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(ANSWER_S)


class RemoteFake(FakeApi):
    """A fake that runs in another process, reached by its `http_url`."""

    def __init__(self, http_url: str) -> None:
        self._door = f"{http_url}/admin"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def _ask(self, method: str, **params: Any) -> Any:
        body = json.dumps({"method": method, "params": params}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._door, body, headers)  # noqa: S310 - http to loopback
        with self._opener.open(request, timeout=ANSWER_S) as response:
            answer = json.load(response)
        if "error" in answer:
            kind, _, text = answer["error"].partition(": ")
            raise {"TimeoutError": TimeoutError, "ValueError": ValueError}.get(kind, RuntimeError)(text)
        return answer["result"]


class FakeModalProcess(RemoteFake):
    """`python -m tests.fake_modal` as a child: it outlives clients, and its CPU is not theirs. For `with`."""

    def __init__(
        self, *, mode: str = "auto", port: int = 0, folder: Path | None = None, **settings: Any
    ) -> None:
        self._argv = [
            sys.executable,
            "-m",
            "tests.fake_modal",
            "--print-env",
            "--mode",
            mode,
            "--port",
            str(port),
        ]
        self._argv += ["--settings", json.dumps(settings), *(["--folder", str(folder)] if folder else [])]

    def __enter__(self) -> Self:
        self._child = subprocess.Popen(self._argv, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        assert self._child.stdout is not None
        printed: dict[str, str] = {}
        for line in self._child.stdout:
            if not line.strip():
                break
            name, _, value = line.strip().partition("=")
            printed[name] = value
        if "FAKE_MODAL_HTTP_URL" not in printed:
            raise RuntimeError(f"the fake did not start: exit code {self._child.wait()}")
        super().__init__(printed["FAKE_MODAL_HTTP_URL"])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.terminate()
        self._child.wait(ANSWER_S)
        if self._child.stdout is not None:
            self._child.stdout.close()

    @property
    def pid(self) -> int:
        return self._child.pid


@contextmanager
def client_environment(fake: FakeApi) -> Iterator[None]:
    """Points clients that are made inside at this fake, by the process's environment."""
    wanted = fake.env
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
