"""One run: read the task, let the strategy that the params name answer it, write what happened.

Exit code 0 means that the run ended the way the agent meant it to: with an answer, or stopped before a
model call that its allowance could not cover. Anything else is a traceback in the log and exit code 1.
"""

from __future__ import annotations

import importlib
import os
import sys

from library_qa.chat import AllowanceUsedUpError, Chat, Endpoint
from library_qa.library import Library
from library_qa.report import Report
from library_qa.task import Task, TaskError


def main() -> int:
    try:
        task = Task.from_environment(os.environ)
        endpoint = Endpoint.from_environment(os.environ)
        strategy = importlib.import_module(f"library_qa.strategies.{task.text_param('strategy')}")
    except (TaskError, ModuleNotFoundError) as error:
        print(f"library_qa: {error}", file=sys.stderr)
        return 2
    report = Report(task.out)
    chat = Chat(endpoint, task, report)
    try:
        answer: str = strategy.answer(task, Library.of_this_interpreter(), chat)
    except AllowanceUsedUpError as stop:
        print(f"library_qa: {stop}", file=sys.stderr)
        report.over_allowance(str(stop))
        return 0
    finally:
        chat.close()
    report.answer(answer)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
