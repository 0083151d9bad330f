"""`evalpurse`: the command line, a thin client of the same daemon that agents use.

Exit codes: 0 done; 1 it failed, the text says why; 2 the command was not understood; 3 no daemon could be
reached; 4 the purse refused. With `--json` stdout carries one JSON value, on failure `{"error": ...}`.
Standard library only: a command costs tens of milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalpurse import __version__
from evalpurse.errors import EvalpurseError
from evalpurse.home import Home
from evalpurse.server.errors import UnreachableError
from evalpurse.server.show import plain
from evalpurse.server.spawn import DAEMON_MODULE, Launch

if TYPE_CHECKING:
    from evalpurse.server.verbs import Verb

OK, FAILED, USAGE, UNREACHABLE, REFUSED_BY_BUDGET = 0, 1, 2, 3, 4

BUDGET_CODES = frozenset({"exceeds_limit", "account_frozen", "account_closed", "limit_below_committed"})


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    options = parser(_verbs_for(words)).parse_args(words)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except EvalpurseError as error:
        return _fail(error, as_json=getattr(options, "json", False))
    except BrokenPipeError:  # `| head` took what it wanted; nothing more may be written, at exit neither
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        return 130
    return code


def _verbs_for(words: Sequence[str]) -> Sequence[Verb]:
    """The verbs that a command may need: none for our own, since hosts wait for `evalpurse mcp`."""
    if words and words[0] in ("mcp", "daemon", "doctor", "version"):
        return ()
    from evalpurse.server.verbs import VERBS

    return VERBS


def parser(verbs: Sequence[Verb]) -> argparse.ArgumentParser:
    """The whole command line, for parsing and for the pages that show it."""
    root = argparse.ArgumentParser(
        prog="evalpurse",
        description="Evals for coding agents inside a purse that a person set.",
        epilog="Exit codes: 0 done, 1 failed, 2 not understood, 3 no daemon reached, 4 the purse refused.",
    )
    shared = _shared()
    commands = root.add_subparsers(metavar="COMMAND", required=True)
    groups: dict[tuple[str, ...], Any] = {(): commands}
    _add(commands, "mcp", "serve an MCP host on stdin and stdout", _mcp, shared)
    daemon = commands.add_parser("daemon", help="start, stop and look at the daemon").add_subparsers(
        metavar="ACTION", required=True
    )
    groups[("daemon",)] = daemon
    _add(daemon, "start", "start the daemon if none runs", _daemon_start, shared)
    stop = _add(
        daemon,
        "stop",
        "stop; harnesses that run go on, and the next daemon takes them up",
        _daemon_stop,
        shared,
    )
    stop.add_argument(
        "--timeout", type=float, default=10.0, metavar="S", help="seconds to wait for what runs (10)"
    )
    _add(daemon, "status", "what the daemon does", _daemon_status, shared)
    logs = _add(daemon, "logs", "the daemon's log", _daemon_logs, shared)
    logs.add_argument("-f", "--follow", action="store_true", help="go on as it grows")
    logs.add_argument("-n", "--lines", type=int, default=100, help="lines from the end to begin with (100)")
    doctor = _add(commands, "doctor", "check this machine and say how to mend it", _doctor, shared)
    doctor.add_argument("--modal", action="store_true", help="also ask Modal: token, environment, rates")
    _add(commands, "version", "the version of this client", _version, shared)
    for verb in verbs:
        _add_verb(groups, verb, shared)
    return root


def _shared() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--home", type=Path, help="home folder (default: $EVALPURSE_HOME or ~/.evalpurse)")
    shared.add_argument("--json", action="store_true", help="answer with one JSON value")
    shared.add_argument("--daemon-module", default=DAEMON_MODULE, help=argparse.SUPPRESS)
    shared.add_argument("--tcp", action="store_true", help=argparse.SUPPRESS)
    return shared


def _add(
    commands: Any,
    name: str,
    text: str,
    run: Callable[[argparse.Namespace], int],
    shared: argparse.ArgumentParser,
) -> argparse.ArgumentParser:
    added: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text, parents=[shared])
    added.set_defaults(run=run)
    return added


def _add_verb(groups: dict[tuple[str, ...], Any], verb: Verb, shared: argparse.ArgumentParser) -> None:
    *path, name = verb.words
    for depth in range(1, len(path) + 1):
        words = tuple(path[:depth])
        if words not in groups:
            group = groups[words[:-1]].add_parser(words[-1], help=f"commands about {words[-1]}")
            groups[words] = group.add_subparsers(metavar="ACTION", required=True)
    added = _add(groups[tuple(path)], name, verb.help, lambda options: _run_verb(verb, options), shared)
    for option in verb.options:
        added.add_argument(*option.flags, **option.settings)
    if verb.extend is not None:
        verb.extend(added)


def home_of(options: argparse.Namespace) -> Home:
    """The home folder that a command is about."""
    return Home(options.home.expanduser().resolve()) if options.home else Home.find()


def launch_of(options: argparse.Namespace) -> Launch:
    """How a command starts a daemon."""
    return Launch(options.daemon_module, ("--tcp",) if options.tcp else ())


def show(options: argparse.Namespace, facts: dict[str, Any], text: str) -> None:
    """One answer, for a program or for a person."""
    print(json.dumps(facts) if options.json else plain(text))


def _mcp(options: argparse.Namespace) -> int:
    from evalpurse.server import bridge

    return bridge.run(home_of(options), launch_of(options))


def _daemon_start(options: argparse.Namespace) -> int:
    from evalpurse.server.client import control

    said = control(home_of(options), "daemon.status", launch=launch_of(options))
    show(options, said, f"The daemon runs (pid {said['pid']}, version {said['version']}) for {said['home']}.")
    return OK


def _daemon_stop(options: argparse.Namespace) -> int:
    from evalpurse.server.life import stop

    pid = stop(home_of(options), options.timeout)
    text = f"The daemon (pid {pid}) has stopped." if pid else "No daemon runs."
    show(options, {"stopped": pid is not None, "pid": pid}, text)
    return OK


def _daemon_status(options: argparse.Namespace) -> int:
    from evalpurse.server.life import status, status_text

    said = status(home_of(options))
    show(options, said, status_text(said))
    return OK if said["running"] else UNREACHABLE


def _daemon_logs(options: argparse.Namespace) -> int:
    from evalpurse.server.life import logs

    logs(home_of(options), options.lines, follow=options.follow, as_json=options.json)
    return OK


def _doctor(options: argparse.Namespace) -> int:
    from evalpurse.server import doctor

    checks = doctor.examine(home_of(options))
    if options.modal:
        checks += doctor.examine_modal(home_of(options))
    show(options, doctor.facts(checks), doctor.text(checks))
    return FAILED if any(check.state == "fail" for check in checks) else OK


def _version(options: argparse.Namespace) -> int:
    show(options, {"version": __version__}, f"evalpurse {__version__}")
    return OK


def _run_verb(verb: Verb, options: argparse.Namespace) -> int:
    from evalpurse.server.ask import carry_out

    facts, text = carry_out(verb, options, home_of(options), launch_of(options))
    show(options, facts, text)
    return FAILED if verb.failed is not None and verb.failed(facts) else OK


def _fail(error: EvalpurseError, *, as_json: bool) -> int:
    code = str(getattr(error, "answered", error.code))  # the code that the daemon gave, where it gave one
    if as_json:
        said = {"code": code, "message": error.message, "hint": error.hint, "facts": error.facts}
        print(json.dumps({"error": said}, default=str))
    else:
        print(f"evalpurse: {error} [code: {code}]", file=sys.stderr)
    if isinstance(error, UnreachableError):
        return UNREACHABLE
    return REFUSED_BY_BUDGET if code in BUDGET_CODES else FAILED


if __name__ == "__main__":
    sys.exit(main())
