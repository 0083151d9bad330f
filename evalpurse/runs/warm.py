"""Warm images: base, repository at a warm commit, and setup, built before anybody waits for them.

A recipe (repository, image or Dockerfile, setup, env, runtime) has at most one warm base. A new one takes its
place only when it is complete, so there is never a moment without. Runs of any commit start from it and apply
what differs, as long as nothing differs that setup may have read. The registry survives the daemon.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import anyio
import anyio.to_thread

from evalpurse.errors import EvalpurseError
from evalpurse.home import Home
from evalpurse.runs.content import canonical_json, digest_of
from evalpurse.runs.errors import SandboxError, SourceError
from evalpurse.runs.git import reason_of, run_git
from evalpurse.runs.setup_inputs import setup_input
from evalpurse.runs.source_delta import Entry, Tree, delta_between, scan, tree_hash
from evalpurse.runs.sources import Commit, materialise, resolve
from evalpurse.runs.variants import Variant

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Recipe:
    """What an image is made of, apart from the source."""

    repo: str
    image: str = ""
    dockerfile: str = ""
    setup: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    runtime: str = ""

    @property
    def key(self) -> str:
        return digest_of(canonical_json(asdict(self)))

    @classmethod
    def of(cls, variant: Variant) -> Recipe:
        spec = variant.spec
        return cls(
            repo=str(variant.commit.repo),
            image=spec.image,
            dockerfile=spec.dockerfile,
            setup=tuple(spec.setup),
            env=dict(spec.env),
            runtime=spec.runtime,
        )


@dataclass(frozen=True)
class WarmBase:
    """A complete warm image, and the tree that it holds."""

    image_id: str
    commit_sha: str
    tree_hash: str
    log_blob: str
    built_at: datetime
    built_in_s: float
    tree: Tree = field(repr=False)


@dataclass(frozen=True)
class Warmth:
    """A recipe that is kept warm, and how its last refresh went."""

    recipe: Recipe
    base: WarmBase | None = None
    checked_at: datetime | None = None
    error: str = ""

    def facts(self) -> dict[str, Any]:
        """For people and machines, without the values of env."""
        base = self.base
        return {
            "key": self.recipe.key[:12],
            "repo": self.recipe.repo,
            "image": self.recipe.dockerfile or self.recipe.image,
            "setup": list(self.recipe.setup),
            "commit": base.commit_sha if base else "",
            "image_id": base.image_id if base else "",
            "built_at": base.built_at.isoformat() if base else "",
            "built_in_s": round(base.built_in_s, 3) if base else None,
            "error": self.error,
        }


class ImageBuilder(Protocol):
    """Builds an image that holds a source."""

    async def build(
        self, recipe: Recipe, folder: Path, *, with_source: bool, checked: bool = False
    ) -> tuple[Any, str]: ...


class WarmBases:
    """The registry of one home folder: `warm.json`, replaced as a whole."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._file = home.path / "warm.json"
        self._kept: dict[str, Warmth] = {}
        self._read()

    def _read(self) -> None:
        try:
            kept = json.loads(self._file.read_text(encoding="utf-8"))
            found = [_warmth(each, kept["schema_version"]) for each in kept["recipes"]]
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError) as error:
            # It can be made again at the price of some builds; starting without it is always right.
            log.warning(
                "%s cannot be read (%s): nothing is warm until `evalpurse warm add`", self._file, error
            )
            return
        self._kept = {each.recipe.key: each for each in found}

    def put(self, warmth: Warmth) -> None:
        """Keeps a recipe's state, durable when it returns. Blocking for a moment."""
        self._kept[warmth.recipe.key] = warmth
        self._write()

    def remove(self, key: str) -> None:
        self._kept.pop(key, None)
        self._write()

    def _write(self) -> None:
        recipes = [_kept(each) for each in self._kept.values()]
        fresh = self._file.with_suffix(".new")
        with fresh.open("w", encoding="utf-8") as file:
            json.dump({"schema_version": SCHEMA_VERSION, "recipes": recipes}, file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._file)

    def all(self) -> list[Warmth]:
        """Every recipe that is kept warm."""
        return sorted(self._kept.values(), key=lambda each: (each.recipe.repo, each.recipe.key))

    def of(self, recipe: Recipe) -> Warmth | None:
        return self._kept.get(recipe.key)

    async def fitting(self, recipe: Recipe, own: Tree, folder: Path) -> WarmBase | None:
        """The warm base that a source can start from; None when there is none or setup must run anew."""
        warmth = self.of(recipe)
        if warmth is None or warmth.base is None:
            return None
        base = warmth.base
        delta = delta_between(base.tree, own)
        shapes = [*delta.gone, *(path for path in delta.written if path not in base.tree)]
        text = None
        if recipe.dockerfile:
            if base.tree.get(recipe.dockerfile) != own.get(recipe.dockerfile):
                log.info("cold start: %s changed", recipe.dockerfile)
                return None
            read = (folder / recipe.dockerfile).read_text
            text = await anyio.to_thread.run_sync(lambda: read(encoding="utf-8", errors="replace"))
        reason = setup_input(recipe.setup, [*delta.written, *delta.gone], shapes, text)
        if reason is not None:
            log.info("cold start from %s: %s", base.commit_sha[:12], reason)
            return None
        return base


def _kept(warmth: Warmth) -> dict[str, Any]:
    base = None
    if warmth.base is not None:
        base = {
            **{
                name: getattr(warmth.base, name)
                for name in ("image_id", "commit_sha", "tree_hash", "log_blob")
            },
            "built_at": warmth.base.built_at.isoformat(),
            "built_in_s": warmth.base.built_in_s,
            "tree": {path: [e.content, e.executable, e.link] for path, e in warmth.base.tree.items()},
        }
    checked = warmth.checked_at.isoformat() if warmth.checked_at else None
    return {"recipe": asdict(warmth.recipe), "base": base, "checked_at": checked, "error": warmth.error}


def _warmth(kept: Mapping[str, Any], schema_version: int) -> Warmth:
    if schema_version != SCHEMA_VERSION:
        raise ValueError(f"schema version {schema_version}, not {SCHEMA_VERSION}")
    recipe = Recipe(**{**kept["recipe"], "setup": tuple(kept["recipe"]["setup"])})
    base = kept["base"]
    if base is not None:
        tree = {path: Entry(*entry) for path, entry in base["tree"].items()}
        if tree_hash(tree) != base["tree_hash"]:
            raise ValueError(f"the tree of {base['image_id']} is damaged")
        base = WarmBase(**{**base, "built_at": datetime.fromisoformat(base["built_at"]), "tree": tree})
    checked = kept["checked_at"]
    return Warmth(recipe, base, datetime.fromisoformat(checked) if checked else None, kept["error"])


class Warmer:
    """Builds warm bases, by hand and on a schedule."""

    def __init__(self, home: Home, bases: WarmBases, builder: ImageBuilder) -> None:
        self._trees = home.sources / "trees"
        self._bases = bases
        self._builder = builder
        self._one = anyio.Lock()
        self._renewed = anyio.Event()

    async def add(self, variant: Variant) -> Warmth:
        """Keeps the recipe of a variant warm, from now on, and builds it at the variant's commit.

        Raises:
            SetupFailedError: the build failed; what was warm before stays.
        """
        return await self._renew(Recipe.of(variant), variant.commit)

    async def refresh(self) -> list[Warmth]:
        """Brings every recipe to the newest commit of its repository; a failure is kept with its recipe."""
        for warmth in self._bases.all():
            try:
                commit = await anyio.to_thread.run_sync(_head, warmth.recipe.repo)
                if warmth.base is not None and warmth.base.commit_sha == commit.sha and not warmth.error:
                    self._bases.put(replace(warmth, checked_at=datetime.now(UTC)))
                    continue
                await self._renew(warmth.recipe, commit)
            except (EvalpurseError, OSError) as error:
                log.warning("%s cannot be kept warm: %s", warmth.recipe.repo, error)
                self._bases.put(replace(warmth, checked_at=datetime.now(UTC), error=str(error)))
        return self._bases.all()

    @property
    def bases(self) -> WarmBases:
        """What is kept warm."""
        return self._bases

    async def until_renewed(self) -> None:
        """Returns when the next warm base is complete."""
        await self._renewed.wait()

    async def keep_warm(self, every_s: float) -> None:
        """Refreshes for ever, first after one period; never when that is 0."""
        while every_s > 0:
            await anyio.sleep(every_s)
            if self._bases.all():
                await self.refresh()

    async def _renew(self, recipe: Recipe, commit: Commit) -> Warmth:
        async with self._one:
            before = self._bases.of(recipe) or Warmth(recipe)
            begun = anyio.current_time()
            folder = await anyio.to_thread.run_sync(materialise, commit, self._trees / commit.tree_sha)
            tree = await anyio.to_thread.run_sync(scan, folder)
            image, log_blob = await self._builder.build(recipe, folder, with_source=True, checked=True)
            base = WarmBase(
                image_id=_id_of(image),
                commit_sha=commit.sha,
                tree_hash=tree_hash(tree),
                log_blob=log_blob,
                built_at=datetime.now(UTC),
                built_in_s=anyio.current_time() - begun,
                tree=tree,
            )
            warmth = replace(before, base=base, checked_at=base.built_at, error="")
            self._bases.put(warmth)
            self._renewed.set()
            self._renewed = anyio.Event()
            return warmth


def _head(repo: str) -> Commit:
    """The commit that HEAD names, whatever the working tree looks like: only committed files are used."""
    done = run_git(Path(repo), "rev-parse", "--verify", "HEAD^{commit}")
    if done.returncode != 0:
        raise SourceError(f"HEAD of {repo} cannot be read: {reason_of(done)}.", hint="Try git log there.")
    return resolve(repo, done.stdout.decode().strip())


def _id_of(image: Any) -> str:
    image_id = image.object_id
    if not isinstance(image_id, str) or not image_id:
        raise SandboxError("Modal built an image and gave it no id.")
    return image_id
