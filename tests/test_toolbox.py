"""What every tool does by being in the toolbox, through an in-memory MCP client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Literal

import anyio
import mcp
import pytest
from pydantic import BaseModel, ConfigDict, Field

from evalpurse.errors import ERROR_META, EvalpurseError
from evalpurse.tools.app import INSTRUCTIONS, all_tools, build_server
from evalpurse.tools.schemas import SchemaError
from evalpurse.tools.toolbox import READY_TIMEOUT_S, Answer, Call, Toolbox, checked


class Part(BaseModel):
    """A nested argument."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(description="Its name.")
    weight: float = Field(default=1, ge=0, description="Its weight.")


class Sum(Answer):
    """An answer with something that may be missing."""

    total: float
    names: list[str]
    note: str | None = None


class TooHeavyError(EvalpurseError):
    """A domain error."""

    code = "too_heavy"


def register(toolbox: Toolbox) -> None:
    @toolbox.tool(title="Weigh", read_only=True, destructive=False, idempotent=True, open_world=False)
    async def weigh(
        call: Call,
        parts: Annotated[list[Part], Field(description="What to weigh.")],
        unit: Annotated[Literal["kg", "lb"], Field(description="Unit.")] = "kg",
        note: Annotated[str | None, Field(description="Comes back.")] = None,
        fill: Annotated[int, Field(description="Bytes of padding.", ge=0)] = 0,
    ) -> Sum:
        """Adds weights up."""
        total = sum(part.weight for part in parts)
        if total > 100:
            raise TooHeavyError(f"{total:g} {unit} is above 100.", hint="Take parts away.", total=total)
        if total == 66:
            async with anyio.create_task_group():
                raise TooHeavyError("Raised in a task group.")
        if total == 77:
            checked(Part, name="x", weight=-1, colour="red")
        names = [part.name for part in parts]
        return Sum(total=total, names=[*names, "x" * fill] if fill else names, note=note)


async def _ready() -> Any:
    return object()


@pytest.fixture
async def client() -> AsyncIterator[mcp.Client]:
    async with mcp.Client(build_server(_ready, registers=[register], strict_size=True)) as client:
        yield client


pytestmark = pytest.mark.anyio


async def test_structure_and_text_carry_the_same_facts_without_what_is_empty(client: mcp.Client) -> None:
    result = await client.call_tool("weigh", {"parts": [{"name": "a", "weight": 2}, {"name": "b"}]})
    assert result.structured_content == {"total": 3.0, "names": ["a", "b"]}
    assert json.loads(_text(result)) == result.structured_content
    assert len(result.content) == 1
    noted = await client.call_tool("weigh", {"parts": [], "note": "hi"})
    assert noted.structured_content == {"total": 0.0, "names": [], "note": "hi"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "Parameter 'parts' is missing."),
        ({"parts": [], "unti": "kg"}, "weigh has no parameter 'unti'. Did you mean 'unit'?"),
        ({"parts": [], "zzz": 1}, "weigh has no parameter 'zzz'. Known: parts, unit, note, fill."),
        ({"parts": [{"nam": "a"}]}, "weigh has no parameter 'parts[0].nam'. Did you mean 'name'?"),
        ({"parts": [{"name": "a", "weight": -1}]}, "Parameter 'parts[0].weight': input should be greater"),
        ({"parts": [], "unit": "stone"}, "Parameter 'unit': input should be 'kg' or 'lb'; got \"stone\"."),
        ({"parts": "many"}, "Parameter 'parts': input should be a valid list; got \"many\"."),
        (
            {"parts": [], "note": "x" * 0, "fill": [1] * 500},
            "Parameter 'fill': input should be a valid integer",
        ),
    ],
)
async def test_wrong_arguments_are_named_one_sentence_each(
    client: mcp.Client, arguments: dict[str, Any], says: str
) -> None:
    result = await client.call_tool("weigh", arguments)
    assert result.is_error
    assert says in _text(result)
    assert _text(result).endswith("[code: bad_arguments]")
    assert len(_text(result)) < 400


async def test_many_wrong_arguments_do_not_drown_the_reader(client: mcp.Client) -> None:
    result = await client.call_tool("weigh", {"parts": [{} for _ in range(1000)]})
    assert "And 990 more of the kind." in _text(result)


async def test_a_list_that_a_host_sent_as_text_is_taken(client: mcp.Client) -> None:
    result = await client.call_tool("weigh", {"parts": '[{"name": "a"}]'})
    assert result.structured_content == {"total": 1.0, "names": ["a"]}


async def test_a_domain_error_is_complete_in_text_and_for_programs(client: mcp.Client) -> None:
    result = await client.call_tool("weigh", {"parts": [{"name": "a", "weight": 101}]})
    assert result.is_error
    assert _text(result) == "101 kg is above 100. Take parts away. [code: too_heavy]"
    assert result.structured_content is None
    assert result.meta is not None
    assert result.meta[ERROR_META] == {
        "code": "too_heavy",
        "message": "101 kg is above 100.",
        "hint": "Take parts away.",
        "facts": {"total": 101.0},
    }


async def test_a_domain_error_out_of_a_task_group_is_the_same(client: mcp.Client) -> None:
    result = await client.call_tool("weigh", {"parts": [{"name": "a", "weight": 66}]})
    assert _text(result) == "Raised in a task group. [code: too_heavy]"


async def test_rules_of_a_model_behind_the_tool_speak_the_same_way(client: mcp.Client) -> None:
    result = await client.call_tool("weigh", {"parts": [{"name": "a", "weight": 77}]})
    assert "Parameter 'weight': input should be greater than or equal to 0; got -1." in _text(result)
    assert "the tool has no parameter 'colour'. Known: name, weight. [code: bad_arguments]" in _text(result)


async def test_an_unknown_tool_is_answered_with_the_nearest(client: mcp.Client) -> None:
    result = await client.call_tool("weight", {})
    assert result.is_error
    assert _text(result) == "There is no tool 'weight'. Did you mean 'weigh'? [code: unknown_tool]"


async def test_an_answer_above_the_hard_limit_is_an_error_under_test(client: mcp.Client) -> None:
    fits = await client.call_tool("weigh", {"parts": [], "fill": 39_000})
    assert not fits.is_error
    result = await client.call_tool("weigh", {"parts": [], "fill": 41_000})
    assert "the hard limit is 40,000" in _text(result)


async def test_services_that_take_too_long_to_open_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never() -> Any:
        await anyio.sleep_forever()

    monkeypatch.setattr("evalpurse.tools.toolbox.READY_TIMEOUT_S", 0.01)
    async with mcp.Client(build_server(never, registers=[register])) as client:
        result = await client.call_tool("weigh", {"parts": []})
    assert "[code: not_ready]" in _text(result)
    assert READY_TIMEOUT_S < 45  # a host's own time limit is 60 s


def _refused(change: Callable[[Toolbox], None]) -> str:
    with pytest.raises(SchemaError) as error:
        change(Toolbox(_ready))
    return str(error.value)


def _add(toolbox: Toolbox, function: Any) -> None:
    toolbox.tool(title="T", read_only=True, destructive=False, idempotent=True, open_world=False)(function)


async def test_a_tool_that_some_host_would_stumble_over_is_refused_at_registration() -> None:
    class Open(BaseModel):
        name: str = Field(description="n")

    class Tree(BaseModel):
        model_config = ConfigDict(extra="forbid")
        children: list[Tree] = Field(description="c")

    async def undocumented(call: Call) -> Sum: ...  # type: ignore[empty-body]
    async def long(call: Call) -> Sum: ...  # type: ignore[empty-body]
    async def no_call(x: Annotated[int, Field(description="x")]) -> Sum: ...  # type: ignore[empty-body]
    async def no_model(call: Call) -> str: ...  # type: ignore[empty-body]
    async def undescribed(call: Call, x: int) -> Sum: ...  # type: ignore[empty-body]
    async def loose(call: Call, x: Any) -> Sum: ...  # type: ignore[empty-body]
    async def mixed(call: Call, x: Any) -> Sum: ...  # type: ignore[empty-body]
    async def deep(call: Call, x: Any) -> Sum: ...  # type: ignore[empty-body]

    loose.__annotations__["x"] = Annotated[Open, Field(description="x")]
    mixed.__annotations__["x"] = Annotated[list[int | str], Field(description="x")]
    deep.__annotations__["x"] = Annotated[Tree, Field(description="x")]
    for function in (no_call, no_model, undescribed, loose, mixed, deep):
        function.__doc__ = "Does it."
    long.__doc__ = "x" * 2001
    assert "needs a docstring" in _refused(lambda box: _add(box, undocumented))
    assert "needs a docstring" in _refused(lambda box: _add(box, long))
    assert "first parameter is not 'call: Call'" in _refused(lambda box: _add(box, no_call))
    assert "must return one model" in _refused(lambda box: _add(box, no_model))
    assert "parameter x has no description" in _refused(lambda box: _add(box, undescribed))
    assert "x takes unknown fields" in _refused(lambda box: _add(box, loose))
    assert "x[] mixes kinds of items" in _refused(lambda box: _add(box, mixed))
    assert "Tree contains itself" in _refused(lambda box: _add(box, deep))


async def test_what_is_published_is_flat_closed_annotated_and_small() -> None:
    async with mcp.Client(build_server(_ready)) as client:
        tools = (await client.list_tools()).tools
    assert len(tools) >= 12
    assert len({tool.name for tool in tools}) == len(tools)
    for tool in tools:
        for schema in (tool.input_schema, tool.output_schema):
            assert schema is not None
            text = json.dumps(schema)
            assert not any(word in text for word in ('"$ref"', '"$defs"', '"title"', '"type": ['))
        assert tool.input_schema["additionalProperties"] is False
        annotations = tool.annotations
        assert annotations is not None
        assert None not in (
            annotations.read_only_hint,
            annotations.destructive_hint,
            annotations.idempotent_hint,
            annotations.open_world_hint,
        )
    assert len(INSTRUCTIONS.encode()) <= 2000
    shown = sum(len(json.dumps(tool.input_schema)) + len(tool.description or "") for tool in tools)
    assert shown < 30_000, "hosts show this to a model before it does anything"
    assert all_tools()[0].__module__ == "evalpurse.tools.cases"


def _text(result: Any) -> str:
    text: str = result.content[0].text
    return text
