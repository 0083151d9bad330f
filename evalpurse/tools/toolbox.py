"""How every tool behaves, in one place, so that a tool itself is parameters, one call down and one answer.

What a model is told must be complete wherever its host cuts: an answer carries the same facts as structured
content and as text; an error's text alone says what happened, what to do and its code. Arguments that are
not known are refused with the nearest name: dropping them silently would run something else than was asked.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import anyio
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool
from mcp.server.mcpserver.utilities.func_metadata import ArgModelBase
from mcp.types import CallToolResult, InputRequiredResult, TextContent, ToolAnnotations
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from evalpurse.errors import ERROR_META, EvalpurseError
from evalpurse.tools.arguments import check_arguments
from evalpurse.tools.schemas import SchemaError, check_input, fields_at, flatten
from evalpurse.tools.texts import HINT_CHARS_MAX, clipped, plain, quoted, valid

if TYPE_CHECKING:
    from evalpurse.runs.services import Services

log = logging.getLogger(__name__)

PAGE_BYTES_TARGET = 25_000  # about 8,000 tokens
PAGE_BYTES_MAX = 40_000  # hosts cut or warn from about here
DESCRIPTION_BYTES_MAX = 2_000  # hosts cut descriptions at 2 KB
READY_TIMEOUT_S = 30.0
_CLOSED = ConfigDict(extra="forbid")
_SENTENCES_MAX = 10
_QUOTE_CHARS_MAX = 80
_NAME_CHARS_COMPARED = 200

ServicesReady = Callable[[], Awaitable["Services"]]
Model = TypeVar("Model", bound=BaseModel)
ToolFunction = TypeVar("ToolFunction", bound=Callable[..., Awaitable["Answer"]])


class AnswerTooLargeError(EvalpurseError):
    """A tool answered with more than a host shows."""

    code: ClassVar[str] = "answer_too_large"


class NotReadyError(EvalpurseError):
    """The daemon still opens its data."""

    code: ClassVar[str] = "not_ready"


class BadArgumentsError(EvalpurseError):
    """A tool was called with arguments that it does not take."""

    code: ClassVar[str] = "bad_arguments"


class ForbiddenError(EvalpurseError):
    """The token that a client came with does not allow this."""

    code: ClassVar[str] = "forbidden"


class Answer(BaseModel):
    """What a tool returns. Fields that are null are left out, and so are these three where they are empty."""

    model_config = _CLOSED

    hint: str = Field(default="", description="What to know about this answer.")
    next: str = Field(default="", description="The sensible next step.")
    truncated: bool = Field(default=False, description="Whether more exists than this page shows.")

    def facts(self) -> dict[str, Any]:
        """JSON values, as a client sees them."""
        facts = self.model_dump(mode="json", exclude_none=True)
        for name in ("hint", "next", "truncated"):
            if not facts[name]:
                del facts[name]
        return facts


@dataclass(frozen=True)
class Session:
    """Who is calling: the role of the token, the name the client gave itself, and the door it came by."""

    role: str = "agent"
    client: str = ""
    door: str = "memory"


@dataclass(frozen=True)
class Call:
    """One call of a tool: the services it may use, who called, and the way to report progress."""

    services: Services
    session: Session
    context: Context[Any, Any]

    @property
    def wants_progress(self) -> bool:
        """Whether the client asked for progress; only then may a wait be long."""
        meta: Any = self.context.request_context.meta
        return bool(meta) and "progress_token" in meta

    async def progress(self, done: float, total: float | None = None, message: str | None = None) -> None:
        """Tells the client how far this call is; does nothing when it did not ask."""
        await self.context.report_progress(done, total, message)


class _Arguments(ArgModelBase):
    """Arguments of any tool: closed, and checked as a whole before their own rules."""

    model_config = _CLOSED
    published: ClassVar[dict[str, Any]] = {}
    """The flat schema that clients see."""

    @model_validator(mode="before")
    @classmethod
    def _sound(cls, given: Any) -> Any:
        check_arguments(cls.published, given)
        return given


class StrictTool(Tool):
    """A tool whose every way to end is a complete answer."""

    _toolbox: Toolbox = PrivateAttr()

    async def run(
        self,
        arguments: dict[str, Any],
        context: Context[Any, Any],
        convert_result: bool = False,  # noqa: ARG002 - ours
    ) -> Any:
        """Carries out one call; raises nothing but cancellation and protocol errors."""
        try:
            self._toolbox.check_role(self, session_of(context))
            answer = await super().run(arguments, context, convert_result=False)
            if isinstance(answer, InputRequiredResult):
                return answer
            return self._toolbox.succeed(self.name, answer)
        except ToolError as error:
            return self._toolbox.explain(self, _cause(error))
        except EvalpurseError as error:
            return self._toolbox.explain(self, error)


class Toolbox:
    """The tools of one server, in the order they were registered.

    `services_ready` returns the services, or raises why they cannot be had. With `strict_size` an answer
    above the hard limit is an error (tests); without, it is delivered and logged.
    """

    def __init__(self, services_ready: ServicesReady, *, strict_size: bool = False) -> None:
        self._services_ready = services_ready
        self._strict_size = strict_size
        self.tools: dict[str, StrictTool] = {}
        self.calls_open = 0

    def tool(
        self,
        *,
        title: str,
        read_only: bool,
        destructive: bool,
        idempotent: bool,
        open_world: bool,
        meta: dict[str, Any] | None = None,
    ) -> Callable[[ToolFunction], ToolFunction]:
        """Registers `async def name(call: Call, ...) -> AnswerModel`; its docstring is what a model reads.

        Raises:
            SchemaError: the signature cannot be published to every host.
        """
        annotations = ToolAnnotations(
            title=title,
            read_only_hint=read_only,
            destructive_hint=destructive,
            idempotent_hint=idempotent,
            open_world_hint=open_world,
        )

        def register(function: ToolFunction) -> ToolFunction:
            tool = self._build(function, title, annotations, meta)
            if tool.name in self.tools:
                raise SchemaError(f"{tool.name}: registered twice.")
            self.tools[tool.name] = tool
            return function

        return register

    def _build(
        self,
        function: Callable[..., Awaitable[Answer]],
        title: str,
        annotations: ToolAnnotations,
        meta: dict[str, Any] | None,
    ) -> StrictTool:
        name = function.__name__
        description = inspect.cleandoc(function.__doc__ or "")
        if not description or len(description.encode()) > DESCRIPTION_BYTES_MAX:
            raise SchemaError(f"{name}: needs a docstring of 1 to {DESCRIPTION_BYTES_MAX:,} bytes.")
        signature = inspect.signature(function, eval_str=True)
        if next(iter(signature.parameters), "") != "call":
            raise SchemaError(f"{name}: the first parameter is not 'call: Call'.")
        if not (
            inspect.isclass(signature.return_annotation) and issubclass(signature.return_annotation, Answer)
        ):
            raise SchemaError(f"{name}: must return one model that extends Answer.")

        @functools.wraps(function)
        async def entry(call: Context[Any, Any], **arguments: Any) -> Answer:
            return await self._enter(function, call, arguments)

        tool = cast(
            StrictTool,
            StrictTool.from_function(
                entry,
                title=title,
                description=description,
                context_kwarg="call",
                annotations=annotations,
                meta=meta,
            ),
        )
        loose = tool.fn_metadata.arg_model
        strict = cast(type[_Arguments], type(loose.__name__, (_Arguments, loose), {}))
        tool.fn_metadata.arg_model = strict
        tool.fn_metadata.output_schema = flatten(tool.fn_metadata.output_schema or {})
        try:
            tool.parameters = flatten(strict.model_json_schema(by_alias=True))
        except SchemaError as error:
            raise SchemaError(f"{name}: {error}") from None
        check_input(name, tool.parameters)
        strict.published = tool.parameters
        tool._toolbox = self  # noqa: SLF001 - the two classes are one idea
        return tool

    async def _enter(
        self,
        function: Callable[..., Awaitable[Answer]],
        context: Context[Any, Any],
        arguments: dict[str, Any],
    ) -> Answer:
        try:
            with anyio.fail_after(READY_TIMEOUT_S):
                services = await self._services_ready()
        except TimeoutError:
            raise NotReadyError(
                f"evalpurse still opens its data after {READY_TIMEOUT_S:.0f} s.",
                hint="Call again in a few seconds; `evalpurse daemon status` says what it does.",
            ) from None
        self.calls_open += 1
        try:
            return await function(Call(services, session_of(context), context), **arguments)
        finally:
            self.calls_open -= 1

    def check_role(self, tool: Tool, session: Session) -> None:
        """A viewer looks and changes nothing.

        Raises:
            ForbiddenError: the tool changes something and the session may only look.
        """
        if session.role == "viewer" and not (tool.annotations and tool.annotations.read_only_hint):
            raise ForbiddenError(
                f"{tool.name} changes something, and this client came with the viewer token.",
                hint="Connect with the agent token.",
            )

    def succeed(self, name: str, answer: Answer) -> CallToolResult:
        """An answer as a host gets it.

        Raises:
            AnswerTooLargeError: under `strict_size`, above the hard limit.
        """
        facts = answer.facts()
        text = json.dumps(facts, ensure_ascii=False, separators=(",", ":"))
        if valid(text) != text:
            text = valid(text)
            facts = json.loads(text)
        size = len(text.encode())
        if size > PAGE_BYTES_MAX:
            if self._strict_size:
                raise AnswerTooLargeError(
                    f"{name} answered with {size:,} bytes; the hard limit is {PAGE_BYTES_MAX:,}.",
                    hint=f"Page it: aim below {PAGE_BYTES_TARGET:,} bytes.",
                )
            log.warning("%s answered with %d bytes, above the limit of %d", name, size, PAGE_BYTES_MAX)
        return CallToolResult(content=[TextContent(type="text", text=text)], structured_content=facts)

    def explain(self, tool: Tool, error: BaseException) -> CallToolResult:
        """A failure as a host gets it: text that is complete on its own, and the same for machines."""
        if isinstance(error, EvalpurseError):
            return failure(error.code, error.message, error.hint, error.facts)
        if isinstance(error, ValidationError) and error.title == tool.fn_metadata.arg_model.__name__:
            return failure(BadArgumentsError.code, wrong_arguments(tool.name, tool.parameters, error), "", {})
        if isinstance(error, ToolError):
            return failure("failed", str(error), "", {})
        reference = secrets.token_hex(4)
        log.error("tool %s failed, ref %s", tool.name, reference, exc_info=error)
        return failure(
            "internal",
            f"{tool.name} failed inside evalpurse: a defect, not your input.",
            f"Its trace is in the daemon's log under ref {reference} (`evalpurse daemon logs`).",
            {"ref": reference},
        )

    def unknown(self, name: str) -> CallToolResult:
        """The answer to a call of a tool that does not exist."""
        hint = nearest(name, list(self.tools)) or f"There are: {', '.join(self.tools)}."
        return failure("unknown_tool", f"There is no tool {name!r}.", hint, {})


def failure(code: str, message: str, hint: str, facts: dict[str, Any]) -> CallToolResult:
    """A failed call; hosts show only the text, programs read `_meta`.

    Nothing is in structuredContent: the first generation of the TypeScript SDK holds what it finds there
    against the tool's output schema, for errors too, and would throw its own complaint in place of the text.
    """
    message, hint = clipped(valid(message)), clipped(valid(hint), HINT_CHARS_MAX)
    text = f"{message} {hint}".strip() + f" [code: {code}]"
    error = {"code": code, "message": message, "hint": hint, "facts": plain(facts)}
    return CallToolResult(
        content=[TextContent(type="text", text=text)], is_error=True, _meta={ERROR_META: error}
    )


def checked(model: type[Model], /, **fields: Any) -> Model:
    """A model made of a tool's arguments, whose rules the tool's own signature does not carry.

    Raises:
        BadArgumentsError: one sentence for each field that is wrong.
    """
    try:
        return model(**fields)
    except ValidationError as error:
        hidden = bool(model.model_config.get("hide_input_in_errors"))
        schema = model.model_json_schema()
        raise BadArgumentsError(wrong_arguments("the tool", schema, error, hide_input=hidden)) from None


def wrong_arguments(
    owner: str, schema: dict[str, Any], error: ValidationError, *, hide_input: bool = False
) -> str:
    """One sentence for each parameter that is wrong, naming it as the client wrote it.

    With `hide_input` what was given is not repeated: it may be a secret.
    """
    problems = error.errors(include_url=False, include_context=False, include_input=not hide_input)
    sentences = [_sentence(owner, schema, problem) for problem in problems[:_SENTENCES_MAX]]
    if len(problems) > _SENTENCES_MAX:
        sentences.append(f"And {len(problems) - _SENTENCES_MAX} more of the kind.")
    return " ".join(sentences)


def _sentence(owner: str, schema: dict[str, Any], problem: Any) -> str:
    location = problem["loc"]
    place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location).lstrip(".")
    if problem["type"] == "extra_forbidden":
        known = fields_at(schema, location[:-1])
        hint = nearest(str(location[-1]), known) or (f"Known: {', '.join(known)}." if known else "")
        return f"{owner} has no parameter '{place}'. {hint}".strip()
    if problem["type"] == "missing":
        return f"Parameter '{place}' is missing."
    reason = str(problem["msg"]).removeprefix("Value error, ").rstrip(".")
    if not place:  # of all arguments together: the reason itself says which
        return f"{reason[:1].upper()}{reason[1:]}."
    got = f"; got {quoted(problem['input'], _QUOTE_CHARS_MAX)}" if "input" in problem else ""
    return f"Parameter '{place}': {reason[:1].lower()}{reason[1:]}{got}."


def nearest(word: str, known: list[str]) -> str:
    """ "Did you mean 'x'?" or nothing."""
    word = word[:_NAME_CHARS_COMPARED]
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"Did you mean '{found[0]}'?" if found else ""


def session_of(context: Context[Any, Any]) -> Session:
    """Who is behind a call, from what the door attached to its message."""
    request = context.request_context.request
    client = context.request_context.session.client_params
    name = client.client_info.name if client else ""
    if isinstance(request, Session):
        return Session(role=request.role, client=name, door=request.door)
    scope = getattr(request, "scope", None)
    if scope is not None:
        return Session(role=scope["evalpurse_role"], client=name, door="http")
    return Session(client=name)


def _cause(error: ToolError) -> BaseException:
    """What a tool raised, under the SDK's wrapper and under groups of one."""
    cause: BaseException = error.__cause__ or error
    while isinstance(cause, BaseExceptionGroup) and len(cause.exceptions) == 1:
        cause = cause.exceptions[0]
    return cause
