"""Images: built once per definition, from steps that really run in a folder.

An image is a folder of what its layers added, and the environment, working folder and command that a
container starts with. Nothing is pulled from a registry: a base is an empty folder with the host's programs
under it. RUN steps are run, except those that only install packages, which are logged as skipped.
"""

# ruff: noqa: N802 - methods carry the names that the protocol calls them by
from __future__ import annotations

import asyncio
import fnmatch
import functools
import json
import re
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

from tests.fake_modal.blobs import Blobs
from tests.fake_modal.cloud import Cloud, task_logs
from tests.fake_modal.machine import HOST_FOLDERS, Machine, copy_tree
from tests.fake_modal.registry import Apps, Mounts, Secrets
from tests.fake_modal.wire import api, new_id, not_found, unimplemented

INSTALLER = re.compile(
    r"(^|[;&|]\s*|\s)(apt-get|apt|apk|dnf|yum|debconf-set-selections|pip3?|uv|conda|micromamba)(\s|$)"
    r"|/modal_requirements\.txt"
)
RECORDED = frozenset(
    {"ARG", "CMD", "ENTRYPOINT", "ENV", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "SHELL", "STOPSIGNAL"}
    | {"USER", "VOLUME", "WORKDIR"}
)
JOIN_WAIT_S = 50.0


class BuildStepFailedError(Exception):
    """A step ended badly; the message is what the build log says about it."""


@dataclass
class Image:
    """One image, being built, built or failed. `builds` counts how often its steps ran."""

    id: str
    key: str
    root: Path
    app_id: str = ""
    task_id: str = ""
    base_id: str = ""
    base_tag: str = ""
    commands: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    status: str = "BUILDING"
    builds: int = 0
    started_at: float = 0.0
    finished_at: float = 0.0
    skipped: list[str] = field(default_factory=list)
    kind: str = "build"
    ttl_s: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def result(self) -> Any:
        return api.GenericResult(status=getattr(api.GenericResult, f"GENERIC_STATUS_{self.status}"))

    def metadata(self, builder_version: str) -> Any:
        return api.ImageMetadata(
            python_version_info="Python 3.11.7",
            workdir=self.workdir or None,
            libc_version_info="glibc 2.36",
            image_builder_version=builder_version,
        )


class Images:
    """The RPCs of `modal.Image` and the store behind them."""

    def __init__(self, cloud: Cloud, apps: Apps, secrets: Secrets, mounts: Mounts, blobs: Blobs) -> None:
        self._cloud = cloud
        self._apps = apps
        self._secrets = secrets
        self._mounts = mounts
        self._blobs = blobs
        self.by_id: dict[str, Image] = {}
        self._by_key: dict[str, str] = {}
        self._tags: dict[str, str] = {}
        self._builds: set[asyncio.Task[None]] = set()

    def get(self, image_id: str) -> Image:
        if image_id not in self.by_id:
            raise not_found(f"Image '{image_id}' not found")
        return self.by_id[image_id]

    def lineage(self, image: Image) -> list[Image]:
        """The image and all it is built on, oldest first."""
        chain = [image]
        while chain[0].base_id:
            chain.insert(0, self.by_id[chain[0].base_id])
        return chain

    async def new_snapshot(
        self, kind: str, tree: Path, like: Image | None, ttl_s: int, skip: set[str]
    ) -> Image:
        """An image with a copy of `tree`; `skip` names entries of its top that are not content."""
        image = self._new(key=new_id("key"), app_id=like.app_id if like else "")
        if like is not None:
            image.env, image.workdir = dict(like.env), like.workdir
            image.entrypoint, image.cmd = like.entrypoint, like.cmd
        image.kind, image.ttl_s, image.started_at = kind, ttl_s, time.time()

        def copy() -> None:
            for entry in tree.iterdir():
                if entry.name in skip:
                    continue
                if entry.is_dir() and not entry.is_symlink():
                    copy_tree(entry, image.root / entry.name)
                    shutil.copystat(entry, image.root / entry.name)
                elif entry.is_symlink() or entry.is_file():
                    shutil.copy2(entry, image.root / entry.name, follow_symlinks=False)

        await asyncio.to_thread(copy)
        self._finish(image, "SUCCESS")
        return image

    async def close(self) -> None:
        for build in list(self._builds):
            build.cancel()
        await asyncio.gather(*self._builds, return_exceptions=True)

    async def ImageGetOrCreate(self, request: Any, call: Any) -> Any:
        self._apps.running(request.app_id)
        definition = request.image
        if definition.HasField("build_function") or request.build_function_id:
            raise unimplemented("Images that run a Python function are not imitated.")
        for base in definition.base_images:
            self.get(base.image_id)
        for secret_id in definition.secret_ids:
            self._secrets.get(secret_id)
        key = self._key(definition, request.builder_version)
        known = self.by_id.get(self._by_key.get(key, ""))
        version = self._cloud.settings.image_builder_version
        if known is not None and not request.force_build:
            if known.status == "SUCCESS":
                return api.ImageGetOrCreateResponse(
                    image_id=known.id, result=known.result(), metadata=known.metadata(version)
                )
            if known.status == "BUILDING":
                return api.ImageGetOrCreateResponse(image_id=known.id)
        image = self._new(key, request.app_id)
        self._by_key[key] = image.id
        build = asyncio.create_task(self._build(image, definition))
        self._builds.add(build)
        build.add_done_callback(self._builds.discard)
        return api.ImageGetOrCreateResponse(image_id=image.id)

    async def ImageJoinStreaming(self, stream: Any, request: Any, call: Any) -> None:
        image = self.get(request.image_id)
        sent = int(request.last_entry_id or 0)
        deadline = time.monotonic() + min(request.timeout or JOIN_WAIT_S, JOIN_WAIT_S)
        while True:
            finished = image.done.is_set()
            lines = self._cloud.logs.read(image.task_id)
            if lines[sent:]:
                fresh, sent = lines[sent:], len(lines)
                await stream.send_message(
                    api.ImageJoinStreamingResponse(task_logs=task_logs(fresh), entry_id=str(sent))
                )
            if finished:
                await stream.send_message(
                    api.ImageJoinStreamingResponse(
                        result=image.result(),
                        metadata=image.metadata(self._cloud.settings.image_builder_version),
                        entry_id=str(sent),
                        eof=True,
                    )
                )
                return
            if time.monotonic() > deadline:
                return
            try:
                await asyncio.wait_for(image.done.wait(), 0.1)
            except TimeoutError:
                continue

    async def ImageFromId(self, request: Any, call: Any) -> Any:
        image = self.get(request.image_id)
        return api.ImageFromIdResponse(
            image_id=image.id, metadata=image.metadata(self._cloud.settings.image_builder_version)
        )

    async def ImagePublish(self, request: Any, call: Any) -> Any:
        self._tags[request.tag] = self.get(request.image_id).id
        return api.ImagePublishResponse()

    async def ImageGetByTag(self, request: Any, call: Any) -> Any:
        if request.tag not in self._tags:
            raise not_found(f"Image '{request.tag}' not found")
        return api.ImageGetByTagResponse(image_id=self._tags[request.tag])

    async def ImageBuildChainGet(self, request: Any, call: Any) -> Any:
        response = api.ImageBuildChainGetResponse()
        for image in self.lineage(self.get(request.image_id)):
            if image.kind == "build" and image.started_at:
                step = response.build_steps.add(
                    image_id=image.id, builder_app_id=image.app_id, builder_task_id=image.task_id
                )
                step.started_at.FromNanoseconds(int(image.started_at * 1e9))
                # The client cuts to microseconds, and the last line is as young as the end.
                step.finished_at.FromNanoseconds(int((image.finished_at or time.time()) * 1e9) + 1_000_000)
        return response

    def _new(self, key: str, app_id: str) -> Image:
        image_id = new_id("im")
        root = self._cloud.folder / "images" / image_id
        root.mkdir(parents=True)
        image = Image(image_id, key, root, app_id=app_id, task_id=new_id("ta"))
        self.by_id[image.id] = image
        return image

    def _key(self, definition: Any, builder_version: str) -> str:
        """Equal for equal definitions, whatever the ids of the mounts they came with."""
        parts = [
            builder_version,
            [(base.docker_tag, base.image_id) for base in definition.base_images],
            list(definition.dockerfile_commands),
            [(file.filename, sha256(file.data).hexdigest()) for file in definition.context_files],
            self._mounts.get(definition.context_mount_id).digest if definition.context_mount_id else "",
            sorted(definition.secret_ids),
            sorted(definition.build_args.items()),
            [(mount.mount_path, mount.volume_id) for mount in definition.volume_mounts],
        ]
        return sha256(json.dumps(parts).encode()).hexdigest()

    async def _build(self, image: Image, definition: Any) -> None:
        image.started_at = time.time()
        image.builds += 1
        image.commands = tuple(definition.dockerfile_commands)
        try:
            await asyncio.wait_for(
                Builder(self, image, definition).run(), self._cloud.settings.image_build_timeout_s
            )
            status = "SUCCESS"
        except BuildStepFailedError as error:
            self._cloud.logs.write(image.task_id, f"Terminating task due to error: {error}\n", 2)
            status = "FAILURE"
        except TimeoutError:
            status = "TIMEOUT"
        except asyncio.CancelledError:
            self._finish(image, "TERMINATED")
            raise
        self._finish(image, status)

    def _finish(self, image: Image, status: str) -> None:
        image.status, image.finished_at = status, time.time()
        image.done.set()


class Builder:
    """Carries out the steps of one image definition."""

    def __init__(self, images: Images, image: Image, definition: Any) -> None:
        self._images = images
        self._cloud = images._cloud
        self._image = image
        self._definition = definition
        secrets = images._secrets
        self._variables = {
            key: value
            for secret_id in definition.secret_ids
            for key, value in secrets.get(secret_id).values.items()
        } | dict(definition.build_args)
        self._args: dict[str, str] = dict(definition.build_args)

    async def run(self) -> None:
        """Raises BuildStepFailedError with the step that failed."""
        steps = join_lines(self._definition.dockerfile_commands)
        self._log(f"Building image {self._image.id}\n")
        for number, (instruction, rest) in enumerate(steps):
            self._log(f"\n=> Step {number}: {instruction} {rest}\n")
            if instruction == "FROM":
                await self._from(rest)
            elif instruction in {"COPY", "ADD"}:
                await asyncio.to_thread(self._copy, rest)
            elif instruction == "RUN":
                await self._run(rest)
            elif instruction in RECORDED:
                self._record(instruction, rest)
            else:
                raise BuildStepFailedError(
                    f'dockerfile parse error: unknown instruction in "{instruction} {rest}"'
                )

    def _log(self, text: str, descriptor: int = 1) -> None:
        self._cloud.logs.write(self._image.task_id, text, descriptor)

    async def _from(self, rest: str) -> None:
        name = next(word for word in rest.split() if not word.startswith("--"))
        image = self._image
        base_ids = {base.docker_tag: base.image_id for base in self._definition.base_images}
        if name in base_ids:
            base = self._images.get(base_ids[name])
            image.base_id, image.base_tag = base.id, base.base_tag
            image.env, image.workdir = dict(base.env), base.workdir
            image.entrypoint, image.cmd = base.entrypoint, base.cmd
            if any(base.root.iterdir()):
                await asyncio.to_thread(copy_tree, base.root, image.root)
        elif image.base_id or image.base_tag:
            raise BuildStepFailedError(f'"FROM {rest}": builds of several stages are not imitated')
        elif any(fnmatch.fnmatchcase(name, pattern) for pattern in self._cloud.settings.missing_tags):
            raise BuildStepFailedError(f"command skopeo copy docker://{name} failed: manifest unknown")
        else:
            image.base_tag = name

    def _copy(self, rest: str) -> None:
        words = shlex.split(rest)
        flags = [word for word in words if word.startswith("--")]
        *sources, destination = [word for word in words if not word.startswith("--")]
        if any(flag.startswith("--from") for flag in flags):
            raise BuildStepFailedError(f'"COPY {rest}": builds of several stages are not imitated')
        files = self._context()
        to_folder = destination.endswith("/") or len(sources) > 1 or destination in {".", ""}
        copied = 0
        for source in sources:
            for inside, read, mode in select(files, source):
                target = self._target(destination, inside, PurePosixPath(source).name, to_folder=to_folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(read())
                target.chmod(mode)
                copied += 1
        if not copied and (files or sources != ["."]):
            if all(source.startswith("/python") for source in sources):
                return  # the client's own standalone Python, which the host's stands for
            raise BuildStepFailedError(
                f'failed to run builder command "COPY {rest}": no such file in the build context'
            )

    def _target(self, destination: str, inside: str, source: str, *, to_folder: bool) -> Path:
        """Where a file goes: into the destination if that is a folder, else it is the destination."""
        target = PurePosixPath(self._image.workdir or "/", destination)
        root = Machine("", self._image.root)
        if inside:
            target /= inside
        elif to_folder or root.locate(str(target)).path.is_dir():
            target /= source
        if target.parts[1] in HOST_FOLDERS:
            raise BuildStepFailedError(f"COPY to {target}: the host's program folders are read-only here")
        return root.locate(str(target)).path

    def _context(self) -> list[tuple[str, Callable[[], bytes], int]]:
        """Files that COPY can see: name without leading slash, content, permission bits."""
        files: list[tuple[str, Callable[[], bytes], int]] = [
            (file.filename.lstrip("/"), constant(file.data), 0o644) for file in self._definition.context_files
        ]
        if self._definition.context_mount_id:
            blobs = self._images._blobs
            for name, digest, mode in self._images._mounts.get(self._definition.context_mount_id).files:
                files.append((name.lstrip("/"), functools.partial(blobs.get, digest), mode))
        return files

    async def _run(self, command: str) -> None:
        if INSTALLER.search(command) and not self._cloud.settings.run_installers:
            self._image.skipped.append(command)
            self._log("(not run: package installers are not imitated)\n")
            return
        argv = ["/bin/sh", "-c", command]
        if command.startswith("["):
            argv = json.loads(command)
        image = self._image
        machine = Machine(
            f"build-{image.id}", image.root, env=dict(image.env), workdir=image.workdir or "/root"
        )
        await asyncio.to_thread(machine.prepare)
        process = await self._cloud.host.build(machine, argv, self._variables, image.workdir or "/root")
        try:
            await process.exited.wait()
        finally:
            process.kill_leader()
            await process.exited.wait()
            await self._cloud.host.stop(machine)
            process.finish()
        for output, descriptor in ((process.stdout, 1), (process.stderr, 2)):
            text = output.read(0, output.end).decode(errors="replace")
            if text:
                self._log(text, descriptor)
        if process.returncode != 0:
            quoted = json.dumps(command, ensure_ascii=False)
            raise BuildStepFailedError(
                f"failed to run builder command {quoted}: container exit status: {process.returncode}"
            )

    def _record(self, instruction: str, rest: str) -> None:
        image = self._image
        if instruction == "ENV":
            image.env |= {key: self._expand(value) for key, value in parse_pairs(rest).items()}
        elif instruction == "ARG":
            name, _, default = rest.partition("=")
            self._variables.setdefault(name, default)
        elif instruction == "WORKDIR":
            image.workdir = str(PurePosixPath(image.workdir or "/", self._expand(shlex.split(rest)[0])))
            Machine("", image.root).locate(image.workdir).path.mkdir(parents=True, exist_ok=True)
        elif instruction in {"ENTRYPOINT", "CMD"}:
            argv = tuple(json.loads(rest)) if rest.startswith("[") else ("/bin/sh", "-c", rest)
            if instruction == "CMD":
                image.cmd = argv
            else:
                image.entrypoint, image.cmd = argv, ()

    def _expand(self, text: str) -> str:
        known = self._variables | self._image.env
        return re.sub(r"\$\{?(\w+)\}?", lambda match: known.get(match.group(1), ""), text)


def constant(data: bytes) -> Callable[[], bytes]:
    return lambda: data


def join_lines(commands: Sequence[str]) -> list[tuple[str, str]]:
    """Instructions of a Dockerfile: continuation lines joined, comments and empty lines dropped."""
    joined: list[str] = []
    open_line = ""
    for line in "\n".join(commands).splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        text = open_line + line.strip()
        if text.endswith("\\"):
            open_line = text[:-1]
            continue
        joined.append(text)
        open_line = ""
    if open_line:
        joined.append(open_line)
    return [(word.upper(), rest.strip()) for word, _, rest in (text.partition(" ") for text in joined)]


def parse_pairs(rest: str) -> dict[str, str]:
    """`KEY=value KEY2="a b"`, or the old `KEY value`."""
    words = shlex.split(rest)
    if words and "=" not in words[0]:
        return {words[0]: " ".join(words[1:])}
    return dict(word.split("=", 1) for word in words)


def select(
    files: Sequence[tuple[str, Callable[[], bytes], int]], source: str
) -> list[tuple[str, Callable[[], bytes], int]]:
    """Files that a COPY source names; the name is relative to a folder source, empty for a file source."""
    pattern = source.lstrip("/").removeprefix("./").rstrip("/").removesuffix("/.")
    if pattern in {"", "."}:
        return list(files)
    found = []
    for name, read, mode in files:
        if name.startswith(pattern + "/"):
            found.append((name[len(pattern) + 1 :], read, mode))
        elif name == pattern:
            found.append(("", read, mode))
        elif fnmatch.fnmatchcase(name, pattern) and name.count("/") == pattern.count("/"):
            found.append((PurePosixPath(name).name, read, mode))
    return found
