"""Child process for checks whose running time their author cannot promise: regular expressions, schemas.

A script, not a module of ours: it is run by its path, so that it starts in a few hundredths of a second.
Requests and replies are lines of JSON. Each check has a budget of processor time that the kernel enforces
by a signal without a handler, so it ends even when the parent is gone and the check never returns to Python.
"""

from __future__ import annotations

import importlib
import json
import re
import resource
import signal
import sys
from typing import Any

MEMORY_BYTES_MAX = 2 << 30


def check(request: dict[str, Any]) -> dict[str, Any]:
    """Does one check: kind `regex` (pattern, flags, full, text) or kind `schema` (schema, value)."""
    if request["kind"] == "schema":
        return check_schema(request["schema"], request["value"])
    flags = 0
    for letter in request["flags"]:
        flags |= getattr(re, letter.upper())
    compiled = re.compile(request["pattern"], flags)
    match = (compiled.fullmatch if request["full"] else compiled.search)(request["text"])
    return {"ok": match is not None, "detail": match.group()[:200] if match else ""}


def check_schema(schema: dict[str, Any], value: Any) -> dict[str, Any]:
    """Validates a value; references that leave the schema are not followed."""
    from jsonschema.exceptions import best_match
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    validator = validator_for(schema, default=Draft202012Validator)(schema, registry=Registry())
    error = best_match(validator.iter_errors(value))
    if error is None:
        return {"ok": True, "detail": ""}
    return {"ok": False, "detail": f"{error.json_path}: {error.message[:300]}"}


def limit_memory() -> None:
    """Bounds the memory of a check, where the system knows such a bound."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, hard))
    except (ValueError, OSError) as error:  # macOS refuses it; the time limit still holds
        print(f"no memory limit: {error}", file=sys.stderr)  # noqa: T201 - this is a script


def main() -> None:
    """Answers requests until the input ends."""
    limit_memory()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if request["kind"] == "schema":
            importlib.import_module("jsonschema")  # not on the check's time
        signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
        try:
            reply = check(request)
        except Exception as error:  # noqa: BLE001 - told to the parent, which fails the grader with it
            reply = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
