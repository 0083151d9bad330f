"""A stand-in for a language model: a chat-completions server that answers only from the context it is sent.

It has no access to the library and none to the expected answers, and the same request gets the same
reply. What a real model does with context it does too, in the simplest form that matters here: it reads
what is there (`reading.py`), asks for a tool when it is offered one and does not know, and overlooks
facts in the middle of long contexts.

    python model_server.py [--port N]        prints `listening on http://127.0.0.1:N/v1`

Tokens are counted as one for every four bytes of text, plus four a message.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import socket
import sys
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import reading
from questions import Question

DONT_KNOW = "I don't know"
BYTES_PER_TOKEN = 4
TOKENS_PER_MESSAGE = 4
REQUEST_BYTES_MAX = 4 << 20
WINDOW_RADIUS = 12

# A fact in the very middle of a context of at least OVERLOOK_TOKENS tokens is overlooked with probability
# OVERLOOK_MAX; less in shorter contexts and towards both ends, in proportion.
OVERLOOK_MAX = 0.3
OVERLOOK_TOKENS = 25_000

Json = dict[str, Any]


class BadRequestError(Exception):
    """The request is not one that the API allows."""


def complete(request: Any) -> Json:
    """The reply to one chat-completions request.

    Raises:
        BadRequestError: says which part of the request is wrong.
    """
    if not isinstance(request, dict):
        raise BadRequestError("the body must be a JSON object")
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequestError("'messages' must be a list with at least one message")
    message = _say(request, messages)
    input_tokens = sum(map(_message_tokens, messages)) + _tokens(json.dumps(request.get("tools", "")))
    output_tokens = min(_message_tokens(message), int(request.get("max_completion_tokens") or 1 << 20))
    return {
        "id": f"chatcmpl-{_digest(messages)[:24]}",
        "object": "chat.completion",
        "created": 0,
        "model": request.get("model", ""),
        "choices": [
            {
                "index": 0,
                "message": message,
                "finish_reason": "tool_calls" if message.get("tool_calls") else "stop",
            }
        ],
        "usage": {
            "prompt_tokens": input_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": input_tokens + output_tokens,
        },
    }


def _say(request: Mapping[str, Any], messages: Sequence[Json]) -> Json:
    question = Question.parse("\n".join(_content(m) for m in messages if m.get("role") == "user"))
    if question is None:
        return {"role": "assistant", "content": DONT_KNOW}
    context = "\n\n".join(_content(m) for m in messages if m.get("role") in ("user", "tool"))
    found = reading.read(question, reading.snippets(context))
    if isinstance(found, reading.Found) and not _overlooked(request, question, found, context):
        return {"role": "assistant", "content": found.answer}
    if request.get("tools") and request.get("tool_choice", "auto") != "none":
        read_on = found if isinstance(found, reading.ReadOn) else None
        if call := _next_tool_call(question, read_on, messages):
            return {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"role": "assistant", "content": DONT_KNOW}


def _overlooked(request: Mapping[str, Any], question: Question, found: reading.Found, context: str) -> bool:
    length = min(1.0, _tokens(context) / OVERLOOK_TOKENS)
    middle = 1.0 - abs(2.0 * found.offset / len(context) - 1.0)
    # The dice depend on the request alone: question, seed and context, so a run can be replayed.
    dice = int(_digest([question.text, request.get("seed"), len(context)])[:12], 16) / 16**12
    return dice < OVERLOOK_MAX * length * middle


def _next_tool_call(
    question: Question, read_on: reading.ReadOn | None, messages: Sequence[Json]
) -> Json | None:
    """Reads on, or opens the first hit that starts the definition, or searches; never the same call twice."""
    made = {
        call["function"]["arguments"]
        for m in messages
        for call in m.get("tool_calls") or ()
        if "function" in call
    }
    wanted: list[tuple[str, Json]] = []
    if read_on:
        line = read_on.line + WINDOW_RADIUS
        wanted.append(("read_window", {"path": read_on.path, "line": line, "radius": WINDOW_RADIUS}))
    stem = question.module.replace(".", "/")
    for path, line, text in _hits(messages):
        if path in (f"{stem}.py", f"{stem}/__init__.py") and reading.defines(question, text):
            wanted.append(("read_window", {"path": path, "line": line, "radius": WINDOW_RADIUS}))
    wanted.append(("search_files", {"pattern": reading.pattern(question)}))
    for name, arguments in wanted:
        text = json.dumps(arguments)
        if text not in made:
            call_id = f"call_{_digest([name, text])[:16]}"
            return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}
    return None


def _hits(messages: Sequence[Json]) -> list[tuple[str, int, str]]:
    """Lines of search results: `path:line: text`."""
    hits = []
    for message in messages:
        if message.get("role") == "tool":
            for line in _content(message).split("\n"):
                path, _, rest = line.partition(":")
                number, colon, text = rest.partition(": ")
                if colon and number.isdigit():
                    hits.append((path, int(number), text))
    return hits


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    raise BadRequestError("'content' of a message must be text")


def _message_tokens(message: Mapping[str, Any]) -> int:
    return (
        TOKENS_PER_MESSAGE + _tokens(_content(message)) + _tokens(json.dumps(message.get("tool_calls", "")))
    )


def _tokens(text: str) -> int:
    return -(-len(text.encode()) // BYTES_PER_TOKEN)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """`POST /v1/chat/completions` with any bearer key; connections stay open."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body leave in one packet
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        if size > REQUEST_BYTES_MAX:
            self.close_connection = True
            return self._refuse(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{size} bytes; at most {REQUEST_BYTES_MAX}"
            )
        body = self.rfile.read(size)
        if self.path != "/v1/chat/completions":
            return self._refuse(HTTPStatus.NOT_FOUND, f"no such path: {self.path}")
        if not self.headers.get("Authorization", "").removeprefix("Bearer").strip():
            return self._refuse(HTTPStatus.UNAUTHORIZED, "no API key; send Authorization: Bearer KEY")
        try:
            return self._send(HTTPStatus.OK, complete(json.loads(body)))
        except (BadRequestError, ValueError) as error:
            return self._refuse(HTTPStatus.BAD_REQUEST, str(error))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
        """Says nothing: thousands of lines about successful requests help no one."""

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        self._send(status, {"error": {"message": message, "type": status.phrase}})

    def _send(self, status: HTTPStatus, value: Json) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class ModelServer(ThreadingHTTPServer):
    """Listens on loopback; port 0 takes a free one."""

    daemon_threads = True
    request_queue_size = 128
    address_family = socket.AF_INET

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


def main() -> int:
    parser = argparse.ArgumentParser(description="A stand-in for a language model, on 127.0.0.1.")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    arguments = parser.parse_args()
    with ModelServer(arguments.port) as server:
        print(f"listening on {server.base_url}", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
