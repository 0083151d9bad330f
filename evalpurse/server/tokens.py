"""One token a role: who may look, who may spend, who may set limits.

Made once, in files that only this user can read. They tell programs of different trust apart; they cannot
hold against a program of the same user that reads the owner's file, which is why the documentation says how
to run the daemon as another user. Standard library only.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from dataclasses import dataclass, field

from evalpurse.home import Home
from evalpurse.server.errors import TokenError

ROLES = ("viewer", "agent", "owner")  # each may do what the ones before it may


def allows(role: str, needed: str) -> bool:
    """Whether a role may do what needs another."""
    return ROLES.index(role) >= ROLES.index(needed)


def make_tokens(home: Home) -> None:
    """Makes the token files that are missing; two processes that do so at once end with the same ones."""
    home.tokens.mkdir(mode=0o700, parents=True, exist_ok=True)
    for role in ROLES:
        path = home.tokens / role
        if path.exists():
            continue
        draft = home.tokens / f".{role}.{os.getpid()}.{secrets.token_hex(4)}"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, (secrets.token_urlsafe(32) + "\n").encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        try:
            os.link(draft, path)  # fails where the file exists: the first one stays
        except FileExistsError:
            pass
        finally:
            draft.unlink()


def read_token(home: Home, role: str) -> str:
    """The token of a role.

    Raises:
        TokenError: there is none, or others can read it; says which file and how to mend it.
    """
    path = home.tokens / role
    try:
        mode = path.stat().st_mode
        token = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        raise TokenError(
            f"There is no {role} token at {path}.", hint="`evalpurse daemon start` makes one."
        ) from None
    except PermissionError:
        raise TokenError(
            f"This user may not read the {role} token at {path}.", hint="Ask the owner of this home for it."
        ) from None
    except UnicodeDecodeError:
        token = ""
    if not token:
        raise TokenError(
            f"The {role} token at {path} is empty or damaged.",
            hint="Remove the file and restart the daemon: it makes a new one.",
        )
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise TokenError(
            f"The {role} token at {path} can be read by others (mode {stat.S_IMODE(mode):04o}).",
            hint=f"Replace it: rm {path}, then restart the daemon.",
        )
    return token


@dataclass(frozen=True)
class Tokens:
    """The tokens of a home, read once when the daemon starts."""

    by_role: dict[str, str] = field(repr=False)

    @classmethod
    def load(cls, home: Home) -> Tokens:
        """Makes what is missing and reads all.

        Raises:
            TokenError: one of the files is damaged or not private.
        """
        make_tokens(home)
        return cls({role: read_token(home, role) for role in ROLES})

    def role_of(self, presented: str) -> str | None:
        """The role of a token, or nothing; takes the same time whichever token is wrong and where."""
        given = presented.encode()
        found = None
        for role, token in self.by_role.items():
            if hmac.compare_digest(given, token.encode()):
                found = role
        return found
