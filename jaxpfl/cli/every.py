"""All commands by name, for the documentation and for the completion of shells."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jaxpfl.cli import app, folders, training


def by_name() -> dict[str, Callable[..., None]]:
    """Every command by its full name (``jaxpfl papers run``), in the order of ``jaxpfl --help``; each is imported."""
    groups: dict[str, Iterable[Callable[..., None]]] = {"": [*training.commands([]), *folders.commands()]}
    for name in app.ALONE:
        groups[""] = [*groups[""], *app.commands_of(name, [name])]
    groups |= {name: app.commands_of(name) for name in app.GROUPS}
    return {
        " ".join(f"jaxpfl {group} {command.__name__.replace('_', '-')}".split()): command
        for group, commands in groups.items()
        for command in commands
    }
