"""Between the socket and the handlers: every call is counted, authenticated, hit by its fault, and logged.

An RPC that no part implements answers UNIMPLEMENTED and is counted like the others, so a test can tell which
ones a change of ours began to need. A handler that crashes is kept in `crashes`: the fake refuses to close
quietly over a defect of its own.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grpclib import GRPCError, Status
from grpclib.config import Configuration
from grpclib.const import Cardinality, Handler
from grpclib.exceptions import StreamTerminatedError
from grpclib.server import Server
from h2.settings import SettingCodes

from tests.fake_modal.faults import Fault, Faults, disconnect
from tests.fake_modal.wire import unimplemented

LOG_LENGTH = 200_000
WINDOW_BYTES = 16 << 20


@dataclass(frozen=True)
class Call:
    """What a handler may know of its call beyond the request."""

    rpc: str
    metadata: Any
    fault: Fault | None


@dataclass(frozen=True)
class Logged:
    """One finished call. `at` is seconds since the epoch; `names` the sandbox, task or app it was about."""

    rpc: str
    at: float
    duration_s: float
    status: str
    names: tuple[str, ...]
    metadata: dict[str, str]


def subjects(request: Any) -> tuple[str, ...]:
    """The names under which a fault can single out this request."""
    found = [
        getattr(request, field, "")
        for field in ("sandbox_id", "task_id", "app_id", "sandbox_name", "app_name")
    ]
    start = getattr(request, "start", None)  # the first message of a stdin stream
    if start is not None and hasattr(start, "task_id"):
        found.append(start.task_id)
    definition = getattr(request, "definition", None)
    if definition is not None:
        found.append(getattr(definition, "name", ""))
    return tuple(name for name in found if isinstance(name, str) and name)


class Gateway:
    """Counts, checks and breaks calls on their way to the parts that answer them."""

    def __init__(
        self, faults: Faults, authenticate: Callable[[str, Any], None], aliases: Callable[[str], str]
    ) -> None:
        self.faults = faults
        self.counts: Counter[str] = Counter()
        self.statuses: Counter[tuple[str, str]] = Counter()
        self.log: deque[Logged] = deque(maxlen=LOG_LENGTH)
        self.in_flight: Counter[str] = Counter()
        self.crashes: list[str] = []
        self._authenticate = authenticate
        self._aliases = aliases
        self._changed: set[asyncio.Future[None]] = set()

    def servable(self, base: type, parts: Sequence[object]) -> Any:
        """An object grpclib can serve: every RPC of `base`, answered by the first part that has its name."""
        concrete: Any = type("Servable", (base,), {})
        concrete.__abstractmethods__ = frozenset()
        mapping: dict[str, Any] = {}
        for path, handler in concrete().__mapping__().items():
            rpc = path.rsplit("/", 1)[-1]
            method = next((getattr(part, rpc) for part in parts if hasattr(part, rpc)), None)
            mapping[path] = Handler(
                self._wrap(rpc, method, handler.cardinality),
                handler.cardinality,
                handler.request_type,
                handler.reply_type,
            )
        return type("Mapping", (), {"__mapping__": lambda _: mapping})()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns when the condition holds; it is tried again each time a call arrives or ends."""
        while not condition():
            waiter = asyncio.get_running_loop().create_future()
            self._changed.add(waiter)
            await waiter

    def notify(self) -> None:
        """Wakes those who wait in `until`."""
        waiting, self._changed = self._changed, set()
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    def _wrap(self, rpc: str, method: Any, cardinality: Cardinality) -> Callable[[Any], Any]:
        async def handle(stream: Any) -> None:
            began = time.time()
            self.counts[rpc] += 1
            self.in_flight[rpc] += 1
            status, names = "OK", list[str]()
            self.notify()
            try:
                await self._serve(rpc, method, cardinality, stream, names)
            except GRPCError as error:
                status = error.status.name
                raise
            except (asyncio.CancelledError, StreamTerminatedError):
                status = "CANCELLED"
                raise
            except Exception:
                status = "CRASH"
                self.crashes.append(f"{rpc}: {traceback.format_exc()}")
                raise
            finally:
                self.in_flight[rpc] -= 1
                self.statuses[rpc, status] += 1
                metadata = {
                    k: v
                    for k, v in (stream.metadata or {}).items()
                    if k.startswith("x-") and "token" not in k
                }
                self.log.append(Logged(rpc, began, time.time() - began, status, tuple(names), metadata))
                self.notify()

        return handle

    async def _serve(
        self, rpc: str, method: Any, cardinality: Cardinality, stream: Any, names: list[str]
    ) -> None:
        self._authenticate(rpc, stream.metadata)
        if method is None:
            raise unimplemented(f"{rpc} is not imitated by this fake.")
        request = await stream.recv_message()
        for name in subjects(request):
            names.append(name)
            if (alias := self._aliases(name)) and alias != name:
                names.append(alias)
        fault = self.faults.take(rpc, names)
        call = Call(rpc, stream.metadata, fault)
        if fault is not None and fault.when == "before" and fault.after_bytes is None:
            await self._suffer(fault, stream)
        if cardinality is Cardinality.UNARY_UNARY:
            response = await method(request, call)
            if fault is not None and fault.when == "after":
                await self._suffer(fault, stream)
            await stream.send_message(response)
        else:
            await method(stream, request, call)

    async def _suffer(self, fault: Fault, stream: Any) -> None:
        if fault.delay_s:
            await asyncio.sleep(fault.delay_s)
        if fault.hang:
            await self.faults.hold(fault.rpc)
        if fault.disconnect:
            disconnect(stream)
            raise GRPCError(Status.UNAVAILABLE, fault.message)
        error = fault.error()
        if error is not None:
            raise error


class LimitedServer(Server):
    """A grpclib server that announces a limit of streams per connection, and can drop its connections."""

    def __init__(self, handlers: Sequence[Any], codec: Any, max_streams: int) -> None:
        super().__init__(
            handlers,
            status_details_codec=codec,
            config=Configuration(
                http2_connection_window_size=WINDOW_BYTES, http2_stream_window_size=WINDOW_BYTES // 2
            ),
        )
        self._max_streams = max_streams
        self.transports: set[Any] = set()

    def _protocol_factory(self) -> Any:
        protocol = super()._protocol_factory()
        made, lost = protocol.connection_made, protocol.connection_lost

        def connection_made(transport: Any) -> None:
            made(transport)
            self.transports.add(transport)
            protocol.connection._connection.update_settings(
                {SettingCodes.MAX_CONCURRENT_STREAMS: self._max_streams}
            )
            protocol.connection.flush()

        def connection_lost(error: BaseException | None) -> None:
            self.transports.discard(protocol.connection._transport)
            lost(error)

        own: Any = protocol  # this instance only, not the class
        own.connection_made, own.connection_lost = connection_made, connection_lost
        return own

    def drop_connections(self) -> int:
        """Aborts every open connection, as a network that went away; returns how many."""
        dropped = list(self.transports)
        for transport in dropped:
            transport.abort()
        return len(dropped)
