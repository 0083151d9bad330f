"""The state that all parts of the fake share: its settings, where things are on disk, and the log store."""

# ruff: noqa: N802 - methods carry the names that the protocol calls them by
from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fake_modal.machine import Host
from tests.fake_modal.wire import Tokens, api

TOKEN_ID = "ak-fake"  # noqa: S105 - as the next
TOKEN_SECRET = "as-fake"  # noqa: S105 - opens nothing but this fake
ENVIRONMENT = "main"


@dataclass
class Settings:
    """What a test may turn, before the start or while it runs.

    `create_rate` is creates per second (None: unlimited) with bursts of `create_burst`; over it the answer is
    RESOURCE_EXHAUSTED, with a retry policy if `create_policy`. `live_limit` bounds running sandboxes, and is
    answered without a policy unless `live_policy`. `usage_share` is how far between request and limit every
    sandbox is metered (0: at its request, 1: at its limit); statistics show usage `stats_delay_s` late.
    `dedupe_creates` makes a create with a known idempotency key answer with the first one's sandbox.
    `max_streams` is the HTTP/2 limit per connection; `max_timeout_s` bounds lifetimes. Installers in RUN
    steps (apt, pip, ...) are skipped unless `run_installers`.
    """

    create_rate: float | None = None
    create_burst: int = 20
    create_policy: bool = True
    live_limit: int | None = None
    live_policy: bool = False
    usage_share: float = 0.0
    stats_delay_s: float = 0.0
    dedupe_creates: bool = False
    router_token_s: float = 3600.0
    auth_token_s: float = 1200.0
    max_streams: int = 100
    page_size: int = 100
    file_read_limit_bytes: int | None = None
    image_builder_version: str = "2025.06"
    image_build_timeout_s: float = 600.0
    missing_tags: tuple[str, ...] = ()
    run_installers: bool = False
    max_timeout_s: int = 86_400


@dataclass
class LogStore:
    """Lines by task: image builds and entrypoints write here, the client's `logs` reads it."""

    _lines: dict[str, list[tuple[float, int, str]]] = field(default_factory=dict)

    def write(self, task_id: str, text: str, descriptor: int = 1) -> None:
        self._lines.setdefault(task_id, []).append((time.time(), descriptor, text))

    def read(
        self, task_id: str, since: float = 0.0, until: float | None = None
    ) -> list[tuple[float, int, str]]:
        return [
            line
            for line in self._lines.get(task_id, ())
            if line[0] >= since and (until is None or line[0] <= until)
        ]

    def text(self, task_id: str) -> str:
        return "".join(line[2] for line in self._lines.get(task_id, ()))


@dataclass
class Cloud:
    """One fake workspace."""

    folder: Path
    host: Host
    settings: Settings
    url: str = ""
    http_url: str = ""
    tokens: Tokens = field(default_factory=Tokens)
    logs: LogStore = field(default_factory=LogStore)
    token_expired: bool = False
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _last_moment: float = 0.0

    def number(self) -> int:
        return next(self._numbers)

    def moment(self) -> float:
        """Now, in seconds since the epoch, later than any moment before: lists are paged by it."""
        self._last_moment = max(time.time(), self._last_moment + 1e-6)
        return self._last_moment


class Logs:
    """The RPCs behind `sb.logs` and `image.logs`."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud

    async def AppFetchLogs(self, request: Any, call: Any) -> Any:
        lines = self._lines(request)[-(request.limit or 0) :]
        return api.AppFetchLogsResponse(
            batches=[api.TaskLogsBatch(task_id=request.task_id, items=task_logs(lines))] if lines else []
        )

    async def AppCountLogs(self, request: Any, call: Any) -> Any:
        width = request.bucket_secs or 1
        buckets: dict[int, list[int]] = {}
        for at, descriptor, _ in self._lines(request):
            counts = buckets.setdefault(int(at // width) * width, [0, 0])
            counts[0 if descriptor == 1 else 1] += 1
        response = api.AppCountLogsResponse(app_id=request.app_id)
        for start in sorted(buckets):
            bucket = response.buckets.add(stdout_logs=buckets[start][0], stderr_logs=buckets[start][1])
            bucket.bucket_start_at.FromSeconds(start)
        return response

    def _lines(self, request: Any) -> list[tuple[float, int, str]]:
        since = request.since.ToNanoseconds() / 1e9
        until = request.until.ToNanoseconds() / 1e9 if request.HasField("until") else None
        return self._cloud.logs.read(request.task_id, since, until)


def task_logs(lines: Iterable[tuple[float, int, str]]) -> list[Any]:
    return [
        api.TaskLogs(data=text, timestamp=at, timestamp_ns=int(at * 1e9), file_descriptor=descriptor)
        for at, descriptor, text in lines
    ]
