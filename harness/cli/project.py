"""`[tool.attnfuzz]` on the command line: defaults of a command's options, its kernels, and what a run has from there."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
from click.core import ParameterSource

from attnfuzz.harness.campaign.project import Project, find_project
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Kernel
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.support.file_target import file_target
from attnfuzz.kernels.targets import is_target

__all__ = [
    "blamed",
    "current_project",
    "kernel_from_project",
    "kernels_from_project",
    "load_from_project",
    "on_command_line",
    "project_defaults",
    "project_line",
    "project_object",
]

_META, _GIVEN = "attnfuzz.project", "attnfuzz.arguments"
_WITHOUT = ("demo", "selftest", "show", "merge")
"""Commands that the settings of a project do not concern."""
_OTHERS = {"repro": ("budget",), "compile": ("deadline",)}
"""Options that mean something else there."""


def project_defaults(context: click.Context, command: click.Command, arguments: Sequence[str]) -> Mapping[str, Any]:
    """Return the defaults of the command's options by the project of the current folder, which `current_project` returns then.

    Raises:
        BadArgument: the file is wrong. Help is shown all the same.
    """
    name = command.name or ""
    if name in _WITHOUT:
        return {}
    try:
        project = find_project()
    except BadArgument:
        if {"--help", "-h"} & set(arguments):
            return {}
        raise
    context.meta[_META], context.meta[_GIVEN] = project, tuple(arguments)
    if project is None:
        return {}
    own = {each.name for each in command.params if each.name not in _OTHERS.get(name, ())}
    defaults = {key: value for key, value in project.values.items() if key in own}
    if name == "report" and "out" in project.values:
        defaults["folder"] = project.values["out"]
    if name == "check-adapter" and len(project.kernels) == 1:
        defaults["kernel"] = project.kernels[0]
    return {name: defaults}


def current_project() -> Project | None:
    """Return the project whose settings the current command has; None where there is none."""
    context = click.get_current_context(silent=True)
    return context.meta.get(_META) if context else None


def blamed(context: click.Context, error: BadArgument) -> BadArgument:
    """Return `error`, with the project's file if the value that it names comes from there and not from the command line."""
    project: Project | None = context.meta.get(_META)
    if project is None:
        return error
    given = {each.partition("=")[0].removeprefix("--").replace("-", "_") for each in context.meta[_GIVEN] if each[:2] == "--"}
    return project.blamed(error, frozenset(given))


def kernels_from_project() -> list[Kernel]:
    """Return the kernels that the project names; empty where it names none.

    Raises:
        BadArgument: one cannot be imported; the text names the file.
    """
    project = current_project()
    return [load_from_project(each) for each in project.kernels] if project else []


def load_from_project(name: str) -> Kernel:
    """Return a kernel that the project names, looked for in the project's folder.

    Raises:
        BadArgument: it cannot be imported; the text names the file.
    """
    project = current_project()
    return registry.get(name) if project is None else _loaded(name, project)


def kernel_from_project(name: str) -> Kernel | None:
    """Return the kernel called `name` if the project names its target. A case file never says what is imported.

    Raises:
        BadArgument: none of its targets that can be imported is that kernel, and one cannot be imported.
    """
    project = current_project()
    if project is None or name in project.kernels or (registry.target(name) or "").startswith("attnfuzz."):
        return None
    wrong: list[BadArgument] = []
    for each in filter(is_target, project.kernels):
        try:
            if (kernel := _loaded(each, project)).name == name:
                return kernel
        except BadArgument as error:
            wrong.append(error)
    if wrong:
        raise wrong[0]
    return None


def project_line() -> str | None:
    """Return the line that says which settings the current command has from the project; None where it has none."""
    if not (settings := project_object()):
        return None
    words = []
    for name, value in settings["settings"].items():
        values = value if isinstance(value, list) else [value]
        words.append(f"{name.replace('_', '-')}={','.join(shlex.quote(str(each)) for each in values)}")
    return f"from {settings['path']}: {' '.join(words)}"


def project_object() -> dict[str, Any] | None:
    """Return the path of the project and the settings that the current command has from it; None where it has none."""
    project, context = current_project(), click.get_current_context()
    if project is None:
        return None
    settings = {name: list(value) if isinstance(value, tuple) else value for name, value in _used(context, project)}
    return {"path": str(project.path), "settings": settings} if settings else None


def on_command_line(name: str) -> bool:
    """Whether the value of a parameter of the current command is from the command line."""
    return click.get_current_context().get_parameter_source(name) in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)


def _used(context: click.Context, project: Project) -> Iterator[tuple[str, Any]]:
    named = [context.params.get(each) for each in ("kernels", "more_kernels") if each in context.params]
    if project.kernels and named and not any(named):
        yield "kernels", project.kernels
    for name, value in context.params.items():
        if context.get_parameter_source(name) is ParameterSource.DEFAULT_MAP:
            yield name, value


def _loaded(name: str, project: Project) -> Kernel:
    # Python's safe path forbids to look for modules in a folder that is not on sys.path.
    folder = None if sys.flags.safe_path and file_target(name) is None else project.folder
    try:
        return registry.get(name, folder)
    except BadArgument as error:
        raise BadArgument(f"{error} (kernels of {project.path})") from None
