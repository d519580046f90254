"""``jaxpfl estimate``: a command for every registered study."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from tyro.conf import arg

from jaxpfl.cli.output import TO, Output, claiming, write
from jaxpfl.studies import registry
from jaxpfl.studies.study import Results, Study


def commands(args: Sequence[str] | None = None) -> tuple[Callable[..., None], ...]:
    """The commands of the group.

    Args:
      args: the arguments; of the studies only the one that they name is imported, all unless given. The other commands
        have a name and a text for ``--help``, no more.
    """
    return commands_of(args, _command)


def commands_of(args: Sequence[str] | None, command: Callable[[str], Callable[..., None]]) -> tuple[Any, ...]:
    """A command for every study, as `commands`.

    Args:
      args: as `commands`.
      command: makes that of a study.
    """
    named = [argument.replace("_", "-") for argument in args[:1]] if args is not None else list(registry.STUDIES)
    return tuple(command(name) if name in named else _title(name) for name in registry.STUDIES)


def _title(name: str) -> Callable[..., None]:
    def command() -> None:
        raise AssertionError(f"the study {name} is not imported: its title alone was asked for")

    return titled(command, name)


def _command(name: str) -> Callable[..., None]:
    study = registry.get(name)

    def command(settings: Any, to: Output, options: Any = None) -> None:
        from jaxpfl.runs import compile_cache

        compile_cache.enable()
        results = study.run(settings, options)
        if not to.json:
            _print(results, to)
        again = ["jaxpfl", "estimate", name, *study.arguments(settings, options)]
        write(results.json, to, results.plots, results.files, again)

    return claiming(titled(with_flags(command, study, to=TO), name))


def with_flags(command: Callable[..., None], study: Study, **more: Any) -> Callable[..., None]:
    """A command with the flags of a study's settings, of its options if any, and of further parts.

    Args:
      command: of ``settings``, ``options`` and the names of ``more``.
      study: the study.
      more: dataclasses of flags, by the parameter's name.
    """
    defaults = {"settings": study.settings(), **more}
    if study.options is not None:
        defaults["options"] = study.options()
    kinds = {part: Annotated[type(value), arg(name="")] for part, value in defaults.items()}
    command.__annotations__ = kinds
    vars(command)["__signature__"] = inspect.Signature([
        inspect.Parameter(part, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=kinds[part])
        for part, value in defaults.items()
    ])  # fmt: skip
    return command


def titled(command: Callable[..., None], name: str) -> Callable[..., None]:
    """A command with the name and the text of a study."""
    command.__name__, command.__doc__ = name.replace("-", "_"), registry.STUDIES[name]
    return command


def _print(results: Results, to: Output) -> None:
    from jaxpfl.support.console import Console

    console = Console()
    lines = [results.hint] if results.hint is not None and to.output is None else []
    for block in [*results.tables(), *lines]:
        if isinstance(block, str):
            console.print(block, highlight=False, soft_wrap=True, markup=False)
        else:
            console.print(block)
