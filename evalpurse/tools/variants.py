"""Tools that register and list variants of a harness."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from evalpurse.runs.variants import VariantSpec
from evalpurse.tools.texts import fitting
from evalpurse.tools.toolbox import PAGE_BYTES_TARGET, Answer, Call, Toolbox, checked

_DESCRIBED = {name: field.description or "" for name, field in VariantSpec.model_fields.items()}


class CreatedVariant(Answer):
    variant: str
    digest: str = Field(description="Identity: commit, overlay, commands, params, model and network.")
    commit: str = Field(description="Full id of the commit that runs start from.")
    existing: bool = Field(description="True when this very variant existed already.")
    same_as: str | None = Field(default=None, description="Name under which the same digest is registered.")


class ListedVariant(BaseModel):
    variant: str
    digest: str
    commit: str
    repo: str
    run: str
    model: str
    parent: str
    params: str
    description: str


class ListedVariants(Answer):
    variants: list[ListedVariant]
    next_cursor: int | None = Field(default=None, description="Pass as cursor for the next page.")


def register(toolbox: Toolbox) -> None:
    """Adds create_variant and list_variants."""

    @toolbox.tool(
        title="Create variant", read_only=False, destructive=False, idempotent=True, open_world=False
    )
    async def create_variant(
        call: Call,
        name: Annotated[str, Field(description=_DESCRIBED["name"])],
        repo: Annotated[str, Field(description=_DESCRIBED["repo"])],
        run: Annotated[str, Field(description=_DESCRIBED["run"])],
        commit: Annotated[str, Field(description=_DESCRIBED["commit"])] = "HEAD",
        setup: Annotated[list[str], Field(description=_DESCRIBED["setup"])] = [],  # noqa: B006 (a JSON schema default)
        patch: Annotated[str, Field(description=_DESCRIBED["patch"])] = "",
        files: Annotated[dict[str, str], Field(description=_DESCRIBED["files"])] = {},  # noqa: B006 (as above)
        params: Annotated[dict[str, Any], Field(description=_DESCRIBED["params"])] = {},  # noqa: B006 (as above)
        env: Annotated[dict[str, str], Field(description=_DESCRIBED["env"])] = {},  # noqa: B006 (as above)
        secrets: Annotated[list[str], Field(description=_DESCRIBED["secrets"])] = [],  # noqa: B006 (as above)
        model: Annotated[str, Field(description=_DESCRIBED["model"])] = "",
        network: Annotated[Literal["blocked", "open"], Field(description=_DESCRIBED["network"])] = "blocked",
        parent: Annotated[str, Field(description=_DESCRIBED["parent"])] = "",
        description: Annotated[str, Field(description=_DESCRIBED["description"])] = "",
        timeout_s: Annotated[float, Field(description=_DESCRIBED["timeout_s"])] = 0.0,
        image: Annotated[str, Field(description=_DESCRIBED["image"])] = "",
        dockerfile: Annotated[str, Field(description=_DESCRIBED["dockerfile"])] = "",
        cpu: Annotated[float, Field(description=_DESCRIBED["cpu"])] = 0.0,
        cpu_limit: Annotated[float, Field(description=_DESCRIBED["cpu_limit"])] = 0.0,
        memory_mb: Annotated[int, Field(description=_DESCRIBED["memory_mb"])] = 0,
        memory_limit_mb: Annotated[int, Field(description=_DESCRIBED["memory_limit_mb"])] = 0,
        gpu: Annotated[str, Field(description=_DESCRIBED["gpu"])] = "",
        region: Annotated[str, Field(description=_DESCRIBED["region"])] = "",
        runtime: Annotated[Literal["", "gvisor", "vm"], Field(description=_DESCRIBED["runtime"])] = "",
        docker: Annotated[bool, Field(description=_DESCRIBED["docker"])] = False,
        allow_domains: Annotated[list[str], Field(description=_DESCRIBED["allow_domains"])] = [],  # noqa: B006 (as above)
        world: Annotated[str, Field(description=_DESCRIBED["world"])] = "",
        restore: Annotated[list[str], Field(description=_DESCRIBED["restore"])] = [],  # noqa: B006 (as above)
    ) -> CreatedVariant:
        """Registers a variant: your harness at one commit plus an overlay (patch, files, params, env, model).

        The commit is resolved now and pinned; uncommitted changes are refused, not ignored. A variant never
        changes: to try something else, register another one with this one as its parent. The run command
        starts in the source folder with EVALPURSE_CASE, EVALPURSE_OUT, EVALPURSE_PARAMS, EVALPURSE_DEADLINE
        and EVALPURSE_ALLOWANCE_USD set.
        """
        spec = checked(
            VariantSpec,
            name=name,
            repo=repo,
            run=run,
            commit=commit,
            setup=setup,
            patch=patch,
            files=files,
            params=params,
            env=env,
            secrets=secrets,
            model=model,
            network=network,
            parent=parent,
            description=description,
            timeout_s=timeout_s,
            image=image,
            dockerfile=dockerfile,
            cpu=cpu,
            cpu_limit=cpu_limit,
            memory_mb=memory_mb,
            memory_limit_mb=memory_limit_mb,
            gpu=gpu,
            region=region,
            runtime=runtime,
            docker=docker,
            allow_domains=allow_domains,
            world=world,
            restore=restore,
        )
        made = await call.services.variants.create(spec)
        return CreatedVariant(
            variant=made.name,
            digest=made.digest,
            commit=made.commit.sha,
            existing=made.existing,
            same_as=made.same_as or None,
            hint=f"The same digest is registered as '{made.same_as}': use that name." if made.same_as else "",
            next="launch_experiment with dry_run=true, together with the baseline.",
        )

    @toolbox.tool(title="List variants", read_only=True, destructive=False, idempotent=True, open_world=False)
    async def list_variants(
        call: Call,
        cursor: Annotated[int, Field(ge=0, description="next_cursor of the page before.")] = 0,
        limit: Annotated[int, Field(ge=1, le=50, description="Variants a page.")] = 20,
    ) -> ListedVariants:
        """Lists registered variants, newest first, with their lineage, commit and params."""
        rows = list(reversed(await call.services.variants.list()))
        page = fitting(
            (
                ListedVariant(
                    variant=row.variant,
                    digest=row.variant_digest[:16],
                    commit=row.commit_sha,
                    repo=row.repo,
                    run=row.run_command[:200],
                    model=row.model,
                    parent=row.parent,
                    params=row.params[:300],
                    description=row.description[:300],
                )
                for row in rows[cursor : cursor + limit]
            ),
            PAGE_BYTES_TARGET,
        )
        after = cursor + len(page)
        return ListedVariants(
            variants=page,
            next_cursor=after if after < len(rows) else None,
            truncated=after < len(rows),
        )
