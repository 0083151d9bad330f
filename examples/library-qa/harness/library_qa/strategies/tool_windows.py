"""Show nothing at first: let the model search, and read only windows around what it found.

Knobs: `turns_max` model calls, `hits_max` lines a search, `radius_max` lines either side of a window.
"""

from __future__ import annotations

from library_qa.chat import Chat
from library_qa.context import conversation
from library_qa.library import Library
from library_qa.task import Task
from library_qa.tools import TOOLS, ToolBox


def answer(task: Task, library: Library, chat: Chat) -> str:
    box = ToolBox(
        library,
        task.question,
        hits_max=task.int_param("hits_max", 12),
        radius_max=task.int_param("radius_max", 40),
    )
    messages = conversation(task.question)
    for _ in range(task.int_param("turns_max", 6) - 1):
        reply = chat.complete(messages, tools=TOOLS)
        if not reply.tool_calls:
            return reply.text
        messages.append(reply.message)
        for call in reply.tool_calls:
            result = box.carry_out(call)
            chat.record_tool_call(call, result)
            messages.append({"role": "tool", "tool_call_id": call.call_id, "content": result})
    return chat.complete(messages, tools=TOOLS, tool_choice="none").text
