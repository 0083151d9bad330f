"""The only place that spends: a chat-completions client that never makes a call it may not be able to pay.

Invariant: before a call is sent, the most that it can cost fits in what is left of the run's allowance.
A token stands for at least one byte of text, so the bytes of the request bound its input tokens; the
output is bounded by the cap in the request.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any
from urllib.parse import urlsplit

from library_qa.report import Report
from library_qa.task import Task, TaskError

Message = dict[str, Any]

TEMPLATE_TOKENS = 512  # what a provider may add around the messages: roles, the system prompt for tools
RETRIED = frozenset({429, 500, 502, 503, 529})
RETRIES = 3


class AllowanceUsedUpError(Exception):
    """The next call could cost more than what is left; it was not made."""

    def __init__(self, bound_usd: Decimal, left_usd: Decimal) -> None:
        super().__init__(f"the next call may cost ${bound_usd:.6f}, but only ${left_usd:.6f} is left")


class ChatError(Exception):
    """The provider refused a call or could not be understood."""


@dataclass(frozen=True)
class Endpoint:
    """Where the model is: an OpenAI-compatible base URL and a key."""

    base_url: str
    key: str = field(repr=False)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Endpoint:
        """Reads `OPENAI_BASE_URL` and `OPENAI_API_KEY`.

        Raises:
            TaskError: one of them is missing.
        """
        for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
            if not environ.get(name):
                raise TaskError(f"environment variable {name} is not set")
        return cls(environ["OPENAI_BASE_URL"].rstrip("/"), environ["OPENAI_API_KEY"])


@dataclass(frozen=True)
class ToolCall:
    """What the model wants done. Arguments are whatever JSON it wrote, `{}` when that is not an object."""

    call_id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Reply:
    """The model's turn: text, or tool calls; `message` is what goes back into the conversation."""

    text: str
    tool_calls: Sequence[ToolCall]
    message: Message


class Chat:
    """A conversation partner that keeps the books of one run."""

    def __init__(self, endpoint: Endpoint, task: Task, report: Report) -> None:
        self._endpoint = endpoint
        self._task = task
        self._report = report
        self._model = task.text_param("model")
        self._input_price = task.price_param("usd_per_million_input") / 1_000_000
        self._output_price = task.price_param("usd_per_million_output") / 1_000_000
        self._output_cap = task.int_param("output_tokens_max", 400)
        self._left_usd = task.allowance_usd
        # Repeats must be able to differ; the report names the seed, so that a run can be replayed.
        fresh = zlib.crc32(task.run_name.encode()) if task.run_name else int.from_bytes(os.urandom(4), "big")
        self._seed = task.int_param("seed", fresh)
        report.number("seed", self._seed)
        url = urlsplit(endpoint.base_url)
        connection = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        self._connection = connection(url.netloc, timeout=max(1.0, task.seconds_left()))
        self._path = f"{url.path}/chat/completions"

    def complete(
        self, messages: Sequence[Message], *, tools: Sequence[Message] = (), tool_choice: str = "auto"
    ) -> Reply:
        """One model call.

        Raises:
            AllowanceUsedUpError: it could cost more than what is left of the allowance.
            ChatError: the provider refused it, or there is no time left for it.
        """
        request: Message = {
            "model": self._model,
            "messages": list(messages),
            "max_completion_tokens": self._output_cap,
            "seed": self._seed,
        }
        if tools:
            request |= {"tools": list(tools), "tool_choice": tool_choice}
        body = json.dumps(request).encode()
        input_tokens_max = len(body) + TEMPLATE_TOKENS
        bound = self._price(input_tokens_max, self._output_cap)
        if bound > self._left_usd:
            raise AllowanceUsedUpError(bound, self._left_usd)
        self._report.say({"event": "request", "messages": len(messages), "last": messages[-1]})
        self._report.model_call_begins(
            self._model, input_tokens_max=input_tokens_max, output_tokens_max=self._output_cap
        )
        answer = self._post(body)
        self._settle(answer.get("usage"), input_tokens_max, messages)
        return self._reply(answer)

    def close(self) -> None:
        self._connection.close()

    def record_tool_call(self, call: ToolCall, result: str) -> None:
        self._report.tool_call()
        self._report.say({"event": "tool", "name": call.name, "arguments": call.arguments, "result": result})

    def _price(self, input_tokens: int, output_tokens: int) -> Decimal:
        return self._input_price * input_tokens + self._output_price * output_tokens

    def _settle(self, usage: Any, input_tokens_max: int, messages: Sequence[Message]) -> None:
        """Books what the provider reports; without a report the whole bound counts as used."""
        if isinstance(usage, dict):
            used = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
        else:
            used = input_tokens_max, self._output_cap
        self._left_usd -= self._price(*used)
        chars = sum(len(message["content"] or "") for message in messages)
        self._report.model_call_ended(
            self._model, input_tokens=used[0], output_tokens=used[1], context_chars=chars
        )

    def _post(self, body: bytes) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._endpoint.key}"}
        for attempt in range(RETRIES + 1):
            left_s = self._task.seconds_left()
            if left_s <= 0:
                raise ChatError("the deadline has passed; no time is left for another call")
            self._connection.request("POST", self._path, body, headers)
            response = self._connection.getresponse()
            content = response.read()
            if response.status == http.client.OK:
                answer: dict[str, Any] = json.loads(content)
                return answer
            # An error reply carries no usage and is not billed, so trying again stays within the bound.
            if response.status not in RETRIED or attempt == RETRIES:
                raise ChatError(f"the provider answered {response.status}: {content[:500]!r}")
            time.sleep(min(2.0**attempt / 4, max(left_s, 0)))
        raise AssertionError("the loop above returns or raises")

    def _reply(self, answer: Mapping[str, Any]) -> Reply:
        message = answer["choices"][0]["message"]
        self._report.say({"event": "reply", "message": message})
        calls = [
            ToolCall(call["id"], call["function"]["name"], _arguments(call["function"]["arguments"]))
            for call in message.get("tool_calls") or ()
        ]
        return Reply((message.get("content") or "").strip(), calls, message)


def _arguments(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
