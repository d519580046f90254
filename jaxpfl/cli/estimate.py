"""The group ``jaxpfl estimate``, which has a command for every registered study."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from tyro.conf import arg

from jaxpfl.cli.output import Output, claim, write
from jaxpfl.studies import registry


def commands(args: Sequence[str] | None = None) -> tuple[Callable[..., None], ...]:
    """Return the commands of the group.

    Args:
      args: arguments after ``estimate``. Only the study that they name is imported; the other commands have only the
        name and description that ``--help`` shows. If None, all studies are imported.
    """
    named = [argument.replace("_", "-") for argument in args[:1]] if args is not None else list(registry.STUDIES)
    found: list[Callable[..., None]] = []
    for name, text in registry.STUDIES.items():
        command = _command(name) if name in named else lambda: None
        command.__name__, command.__doc__ = name.replace("-", "_"), text
        found.append(command)
    return tuple(found)


def _command(name: str) -> Callable[..., None]:
    """Return the command of a study, with flags for its settings, its options (if any) and its output."""
    study = registry.get(name)

    def command(settings: Any, to: Output, options: Any = None) -> None:
        from jaxpfl.runs import compile_cache
        from jaxpfl.support.console import Console

        if to.output is not None:
            claim(to.output, name)
        compile_cache.enable()
        results = study.run(settings, options)
        if not to.json:
            console = Console()
            lines = [results.hint] if results.hint is not None and to.output is None else []
            for block in [*results.tables(), *lines]:
                plain = {"highlight": False, "soft_wrap": True, "markup": False} if isinstance(block, str) else {}
                console.print(block, **plain)
        if to.json or to.output is not None:
            again = ["jaxpfl", "estimate", name, *study.arguments(settings, options)]
            write(results.json, to, results.plots, results.files, again)

    defaults = {"settings": study.settings(), "to": Output()}
    if study.options is not None:
        defaults["options"] = study.options()
    kinds = {part: Annotated[type(value), arg(name="")] for part, value in defaults.items()}
    command.__annotations__ = kinds
    vars(command)["__signature__"] = inspect.Signature([
        inspect.Parameter(part, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=kinds[part])
        for part, value in defaults.items()
    ])  # fmt: skip
    return command
