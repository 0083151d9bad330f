"""Variants: a harness at one commit with an overlay, named by people and identified by a digest.

The digest covers all that can change what a run does. A name always stands for one digest; a digest has one
name. Each variant's source is prepared once, and a preparation that did not finish is never used.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import anyio
import anyio.to_thread
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from evalpurse.home import Home
from evalpurse.runs.content import canonical_json, check_size, checked_files, digest_of
from evalpurse.runs.errors import (
    SecretRefusedError,
    UnknownSecretError,
    UnknownVariantError,
    VariantExistsError,
    nearest,
)
from evalpurse.runs.patch import apply_overlay, check_overlay
from evalpurse.runs.sandboxes.protocol import Backend, Machine, Prepared
from evalpurse.runs.sources import Commit, materialise, resolve
from evalpurse.runs.worlds import Worlds
from evalpurse.store.database import Store
from evalpurse.store.records import VariantRow

NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$"
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_BYTES_MIN = 8
"""Shorter secret values are not searched for: they would be found in innocent text."""

_SECRET_FORMS = re.compile(
    r"sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,}|AKIA[0-9A-Z]{16}"
    r"|AIza[0-9A-Za-z_-]{35}|xox[abprs]-[A-Za-z0-9-]{10,}|hf_[A-Za-z0-9]{30,}|glpat-[A-Za-z0-9_-]{20,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)


ARGUMENT_BYTES_MAX = 100_000
"""Of a command, or of all of `env`: Linux starts no process with an argument above 128 KiB."""


def _argument_bytes(text: str) -> int:
    return len(text.encode(errors="surrogatepass")) + 1


def _check_argument_bytes(what: str, size_bytes: int) -> None:
    if size_bytes > ARGUMENT_BYTES_MAX:
        raise ValueError(
            f"{what} takes {size_bytes:,} bytes; no process can be started with more than "
            f"{ARGUMENT_BYTES_MAX:,}. Put long content into `files`"
        )


class VariantSpec(BaseModel):
    """What a variant is made of. `name`, `parent` and `description` are labels; the rest is its identity."""

    # Errors must not repeat what they refuse: it may be a secret.
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    name: Annotated[str, Field(pattern=NAME_PATTERN, description="Unique label of 1 to 100 characters.")]
    repo: Annotated[
        str, Field(min_length=1, max_length=4_096, description="Absolute path of a local git repository.")
    ]
    commit: Annotated[
        str, Field(max_length=300, description="Commit, branch or tag; stored as the full id.")
    ] = "HEAD"
    run: Annotated[
        str | list[str],
        WithJsonSchema({"type": "string"}),
        Field(description="Shell command that runs the harness once, in the source folder."),
    ]
    setup: Annotated[
        list[str], Field(max_length=50, description="Shell commands that prepare the source, run once.")
    ] = []
    patch: Annotated[str, Field(description="Unified diff against the commit.")] = ""
    files: Annotated[
        dict[str, str],
        Field(description="Whole files to write after the patch: path to text ('base64:...' for binary)."),
    ] = {}
    params: Annotated[dict[str, Any], Field(description="JSON object, given in EVALPURSE_PARAMS.")] = {}
    env: Annotated[dict[str, str], Field(description="Environment variables; never secrets.")] = {}
    secrets: Annotated[
        list[str], Field(max_length=50, description="Names of secrets of the home folder to set.")
    ] = []
    model: Annotated[str, Field(max_length=200, description="Model the harness uses, for reports.")] = ""
    network: Annotated[Literal["blocked", "open"], Field(description="Network of the sandbox.")] = "blocked"
    parent: Annotated[str, Field(max_length=100, description="Variant this one was derived from.")] = ""
    description: Annotated[str, Field(max_length=2_000, description="What was changed and why.")] = ""
    timeout_s: Annotated[
        float,
        Field(ge=0, le=86_400, allow_inf_nan=False, description="Overrides the case's timeout; 0 keeps it."),
    ] = 0.0

    image: Annotated[str, Field(max_length=300, description="Registry image of its sandboxes (modal).")] = ""
    dockerfile: Annotated[
        str,
        Field(max_length=300, description="Dockerfile in the repository to build instead of image (modal)."),
    ] = ""
    cpu: Annotated[float, Field(ge=0, le=64, description="Cores requested; 0: the backend's default.")] = 0.0
    cpu_limit: Annotated[float, Field(ge=0, le=64, description="Cores at most; 0: as requested.")] = 0.0
    memory_mb: Annotated[int, Field(ge=0, le=512_000, description="Memory requested, MiB; 0: default.")] = 0
    memory_limit_mb: Annotated[
        int, Field(ge=0, le=512_000, description="Memory at most, MiB; 0: as requested.")
    ] = 0
    gpu: Annotated[str, Field(max_length=50, description="GPU type, for example T4 (modal).")] = ""
    region: Annotated[str, Field(max_length=50, description="Region to run in (modal).")] = ""
    runtime: Annotated[
        Literal["", "gvisor", "vm"],
        Field(description="Kind of sandbox; empty: the backend's choice (modal)."),
    ] = ""
    docker: Annotated[bool, Field(description="Start dockerd before the run; needs runtime vm (modal).")] = (
        False
    )
    allow_domains: Annotated[
        list[str], Field(max_length=100, description="Domains that a blocked network lets through (modal).")
    ] = []
    world: Annotated[
        str,
        Field(
            max_length=100,
            description="World (name or digest) mounted read-only at EVALPURSE_WORLD; its digest is pinned.",
        ),
    ] = ""
    restore: Annotated[
        list[str],
        Field(
            max_length=50,
            description="Shell commands run in each sandbox, in the source folder, before the harness.",
        ),
    ] = []

    @field_validator("run")
    @classmethod
    def _run_is_a_command(cls, run: str | list[str]) -> str | list[str]:
        parts = [run] if isinstance(run, str) else run
        if not parts or not parts[0].strip() or any("\0" in part for part in parts):
            raise ValueError("the run command is empty or has a NUL character")
        _check_argument_bytes("the run command", sum(map(_argument_bytes, parts)))
        return run

    @field_validator("setup", "restore")
    @classmethod
    def _setup_is_commands(cls, commands: list[str], info: ValidationInfo) -> list[str]:
        if any(not command.strip() or "\0" in command for command in commands):
            raise ValueError(f"a {info.field_name} command is empty or has a NUL character")
        sizes = list(map(_argument_bytes, commands))
        if info.field_name == "restore":  # they are handed over together
            _check_argument_bytes("restore", sum(sizes))
        else:
            _check_argument_bytes("a setup command", max(sizes, default=0))
        return commands

    @field_validator("env")
    @classmethod
    def _env_is_settable(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if not _ENV_NAME.fullmatch(name) or name.startswith("EVALPURSE_"):
                raise ValueError(f"{name!r} cannot be set: not a variable name, or reserved (EVALPURSE_...)")
            if "\0" in value:
                raise ValueError(f"the value of {name} has a NUL character")
            if _SECRET_FORMS.search(value):
                raise ValueError(
                    f"the value of {name} looks like a secret, and env is stored and shown; ask the owner to "
                    f"run `evalpurse secrets set {name}`, then give {name} in `secrets`"
                )
        _check_argument_bytes("env", sum(_argument_bytes(name + value) for name, value in env.items()))
        return env

    @field_validator("secrets")
    @classmethod
    def _secrets_are_names(cls, secrets: list[str]) -> list[str]:
        names = all(len(name) <= 200 and _ENV_NAME.fullmatch(name) for name in secrets)
        if not names or len(set(secrets)) != len(secrets):
            raise ValueError(
                "secrets must be distinct names of environment variables, of up to 200 characters"
            )
        return sorted(secrets)

    @model_validator(mode="after")
    def _content_is_sound(self) -> VariantSpec:
        check_size(checked_files(self.files) + len(self.patch), "the overlay")
        both = sorted(set(self.secrets) & set(self.env))
        if both:
            raise ValueError(f"{', '.join(both)} cannot be in `env` and in `secrets`")
        try:
            canonical_json(self.model_dump())
        except ValueError as error:
            raise ValueError(f"the variant cannot be stored: {error}") from error
        return self

    @property
    def command(self) -> list[str]:
        """The run command as an argument list."""
        return ["sh", "-c", self.run] if isinstance(self.run, str) else list(self.run)

    @property
    def machine(self) -> Machine:
        """What it asks of the machine."""
        return Machine(
            image=self.image,
            dockerfile=self.dockerfile,
            cpu=self.cpu,
            cpu_limit=self.cpu_limit,
            memory_mb=self.memory_mb,
            memory_limit_mb=self.memory_limit_mb,
            gpu=self.gpu,
            region=self.region,
            runtime=self.runtime,
            docker=self.docker,
            allow_domains=tuple(self.allow_domains),
            world=self.world,
            restore=tuple(self.restore),
        )


def digest_of_variant(spec: VariantSpec, commit_sha: str) -> str:
    """Identity of a variant: SHA-256 of the canonical JSON of all that can change what its runs do."""
    identity = {
        "commit": commit_sha,
        "run": spec.command,
        "setup": spec.setup,
        "patch": spec.patch,
        "files": spec.files,
        "params": spec.params,
        "env": spec.env,
        "secrets": spec.secrets,
        "model": spec.model,
        "network": spec.network,
        "timeout_s": spec.timeout_s,
    }
    machine = {name: value for name, value in asdict(spec.machine).items() if value}
    if machine:
        identity["machine"] = machine
    return digest_of(canonical_json(identity))


@dataclass(frozen=True)
class Variant:
    """A stored variant. `existing`: this call found it; `same_as`: asked for under another name than this."""

    name: str
    digest: str
    spec: VariantSpec
    commit: Commit
    created_at: datetime
    existing: bool = True
    same_as: str = ""


@dataclass
class _Preparation:
    """One preparation under way; those who come later wait for it and share its end."""

    done: anyio.Event = field(default_factory=anyio.Event)
    error: Exception | None = None


class Variants:
    """Creates, finds and prepares variants. One instance a home folder."""

    def __init__(self, store: Store, home: Home, worlds: Worlds | None = None) -> None:
        self._store = store
        self._home = home
        self._worlds = worlds or Worlds(store, home)
        self._creating = anyio.Lock()
        self._known: dict[str, Variant] = {}
        self._preparing: dict[tuple[str, str], _Preparation] = {}
        self._ready: set[tuple[str, str]] = set()
        for leftover in self._trees.glob(".*"):  # of a daemon that was killed while it wrote them
            shutil.rmtree(leftover, ignore_errors=True)

    @property
    def _trees(self) -> Path:
        return self._home.sources / "trees"

    async def create(self, spec: VariantSpec) -> Variant:
        """Stores a variant under its name, or returns the one that it already is.

        When the same digest has another name already, nothing is stored: that variant is returned, and
        `same_as` is its name.

        Raises:
            SourceError: the repository or commit cannot be used (see `sources.resolve`).
            OverlayError, PatchError: patch or files do not fit on the commit.
            VariantExistsError: the name stands for another digest.
            UnknownVariantError: the parent does not exist.
            SecretRefusedError, UnknownSecretError: a secret's value was given, or an unknown name.
            UnknownWorldError: no world has this name or digest.
        """
        await anyio.to_thread.run_sync(self._check_secrets, spec)
        if spec.world:
            # What the name stands for now is what all its runs will see.
            world = await self._worlds.get(spec.world)
            spec = spec.model_copy(update={"world": world.world_digest})
        commit = await anyio.to_thread.run_sync(resolve, spec.repo, spec.commit)
        digest = digest_of_variant(spec, commit.sha)
        async with self._creating:
            found = await self._existing(spec, digest)
            if found is not None:
                return found
            if spec.parent:
                await self.get(spec.parent)
            await anyio.to_thread.run_sync(self._check_overlay, spec, commit)
            variant = Variant(spec.name, digest, spec, commit, datetime.now(UTC), existing=False)
            await self._append(variant)
        return variant

    async def _existing(self, spec: VariantSpec, digest: str) -> Variant | None:
        named = await self._store.fetch("variant_by_name", variant=spec.name)
        if named:
            found = named[0]["variant_digest"]
            if found == digest:
                return await self.get(spec.name)
            raise VariantExistsError(
                f"Variant '{spec.name}' exists with digest {found[:12]}; this one has {digest[:12]}.",
                hint="A variant never changes. Choose another name, and name this one as its parent.",
                existing_digest=found,
                given_digest=digest,
            )
        same = await self._store.fetch("variant_by_digest", variant_digest=digest)
        if same:
            first = await self.get(same[0]["variant"])
            return replace(first, same_as=first.name)
        return None

    async def _append(self, variant: Variant) -> None:
        spec, commit = variant.spec, variant.commit
        kept = canonical_json(
            {"spec": spec.model_dump(), "tree_sha": commit.tree_sha, "repo": str(commit.repo)}
        )
        blob = await anyio.to_thread.run_sync(self._store.blobs.put, kept)
        row = VariantRow(
            variant=variant.name,
            variant_digest=variant.digest,
            repo=str(commit.repo),
            commit_sha=commit.sha,
            run_command=spec.run if isinstance(spec.run, str) else json.dumps(spec.run),
            model=spec.model,
            params=canonical_json(spec.params).decode(),
            parent=spec.parent,
            description=spec.description,
            spec_blob=blob,
            created_at=variant.created_at,
        )
        await self._store.append([row])

    async def get(self, name: str) -> Variant:
        """The variant of a name.

        Raises:
            UnknownVariantError: names the nearest.
        """
        if name in self._known:
            return self._known[name]
        rows = await self._store.fetch("variant_by_name", variant=name)
        if not rows:
            raise UnknownVariantError.named(name, [row.variant for row in await self.list()])
        row = rows[0]
        kept = json.loads(await anyio.to_thread.run_sync(self._store.blobs.get, row["spec_blob"]))
        commit = Commit(sha=row["commit_sha"], tree_sha=kept["tree_sha"], repo=Path(kept["repo"]))
        spec = VariantSpec.model_validate(kept["spec"])
        variant = Variant(row["variant"], row["variant_digest"], spec, commit, row["created_at"])
        self._known[name] = variant
        return variant

    async def list(self) -> Sequence[VariantRow]:
        """Rows of all variants, oldest first."""
        rows = [VariantRow(**row) for row in await self._store.fetch("list_variants")]
        return sorted(rows, key=lambda row: row.created_at)

    async def prepare(self, variant: Variant, backend: Backend) -> Prepared:
        """The variant's source with overlay and setup done, made at the first call.

        Concurrent calls share one preparation and its failure. A failed or cancelled one leaves nothing.

        Raises:
            SourceError, OverlayError: the source is gone, or the overlay does not fit.
            SetupFailedError: from the backend.
        """
        key = (backend.name, variant.digest)
        while key not in self._ready:
            under_way = self._preparing.get(key)
            if under_way is None:
                await self._prepare_once(variant, backend)
            else:
                await under_way.done.wait()
                if under_way.error is not None:
                    raise under_way.error
        return Prepared(variant.digest, self._place(variant, backend) / "source")

    def _place(self, variant: Variant, backend: Backend) -> Path:
        """One a backend: where setup runs in the folder, and where it runs in an image, leave other files."""
        return self._home.sources / "prepared" / backend.name / variant.digest

    async def _prepare_once(self, variant: Variant, backend: Backend) -> None:
        key = (backend.name, variant.digest)
        preparation = self._preparing[key] = _Preparation()
        place, spec = self._place(variant, backend), variant.spec
        complete = place / "complete"
        try:
            done = await anyio.to_thread.run_sync(complete.exists)
            if not done:
                await anyio.to_thread.run_sync(self._write_source, variant, place)
            prepared = Prepared(variant.digest, place / "source")
            await backend.prepare(prepared, spec.setup, spec.env, spec.machine, done=done)
            await anyio.to_thread.run_sync(complete.touch)
            self._ready.add(key)
        except Exception as error:
            preparation.error = error
            raise
        finally:
            # Also when cancelled: a next caller must find all of it or nothing.
            with anyio.CancelScope(shield=True):
                if not await anyio.to_thread.run_sync(complete.exists):
                    await anyio.to_thread.run_sync(_remove, place)
                del self._preparing[key]
                preparation.done.set()

    def _write_source(self, variant: Variant, place: Path) -> None:
        spec = variant.spec
        _remove(place)  # what a killed daemon may have left half-made
        place.mkdir(mode=0o700, parents=True)
        tree = self._tree(variant.commit)
        shutil.copytree(tree, place / "source", symlinks=True)
        apply_overlay(place / "source", spec.patch, spec.files)

    def _tree(self, commit: Commit) -> Path:
        return materialise(commit, self._trees / commit.tree_sha)

    def _check_overlay(self, spec: VariantSpec, commit: Commit) -> None:
        check_overlay(self._tree(commit), spec.patch, spec.files)

    def _check_secrets(self, spec: VariantSpec) -> None:
        known = {file.name: file for file in self._home.secrets.glob("*") if file.is_file()}
        for name in spec.secrets:
            if name not in known:
                raise UnknownSecretError(
                    f"Secret {name} is not in this home folder.",
                    hint=f"{nearest(name, known, what='secrets')} Its owner adds it with: "
                    f"evalpurse secrets set {name}",
                )
        shadowed = sorted(set(spec.env) & set(known))
        if shadowed:
            raise SecretRefusedError(
                f"{', '.join(shadowed)} is a secret of this home folder and cannot be set in `env`.",
                hint="Give the name in `secrets`.",
            )
        values = {name: file.read_text(encoding="utf-8").strip() for name, file in known.items()}
        for place, text in _texts(spec.model_dump(), ""):
            for name, value in values.items():
                if len(value) >= _SECRET_BYTES_MIN and value in text:
                    raise SecretRefusedError(
                        f"`{place}` contains the value of secret {name}, and variants are stored and shown.",
                        hint=f"Give the name {name} in `secrets`; the harness finds it in its environment.",
                    )


def _texts(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """All strings of a JSON value, each with the top-level field that holds it."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict):
        for key, child in value.items():
            if place:
                yield place, str(key)
            yield from _texts(child, place or key)
    elif isinstance(value, list):
        for child in value:
            yield from _texts(child, place)


def _remove(folder: Path) -> None:
    """Removes a folder that setup commands may have filled with folders that cannot be written to."""
    if not folder.exists():
        return
    for inner in folder.rglob("*"):
        if inner.is_dir() and not inner.is_symlink():
            inner.chmod(0o700)
    shutil.rmtree(folder)
