"""``jaxpfl completion``: the script that completes commands, methods, flags and their choices in bash and zsh."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from jaxpfl.cli.parsing import Flag, flags_of

_OF_METHODS = ("run", "compare", "sweep")
_ZSH = """\
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
autoload -Uz bashcompinit && bashcompinit
"""
_FUNCTION = """\
_jaxpfl() {
  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" command="" found at=1
  if [ "$word" = "=" ]; then  # bash parts --flag=value at the sign
    word=""
  elif [ "$before" = "=" ]; then
    before="${COMP_WORDS[COMP_CWORD-2]}"
  fi
  while [ "$at" -lt "$COMP_CWORD" ]; do
    found="${command:+$command }${COMP_WORDS[at]}"
    _jaxpfl_words "$found" >/dev/null || break
    command="$found"
    at=$((at + 1))
  done
  COMPREPLY=($(compgen -W "$(_jaxpfl_choices "$command $before" || _jaxpfl_words "$command")" -- "$word"))
}
complete -o default -F _jaxpfl jaxpfl
"""


def commands(args: Sequence[str] = ()) -> tuple[Callable[..., None], ...]:
    """The command, the same for all arguments."""
    del args
    return (completion,)


def completion(
    shell: Annotated[Positional[Literal["bash", "zsh"]], arg(metavar="SHELL", help="The shell.")],
) -> None:
    """Print the script that completes commands, methods, flags and their choices in a shell.

    Load it there: source <(jaxpfl completion bash), or from a file that it is written to once, which is faster.
    """
    print(script(shell), end="")


def script(shell: str) -> str:
    """The script for bash or zsh, which reads nothing but itself when it completes."""
    words, choices = _tables()
    return "".join(
        [
            f"# Completion of jaxpfl in {shell}, made by jaxpfl completion {shell}.\n",
            _ZSH * (shell == "zsh"),
            _lookup("_jaxpfl_words", words),
            _lookup("_jaxpfl_choices", choices),
            _FUNCTION,
        ]
    )


def _tables() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The words that may follow a command, and those that may follow a flag of a command (``run --model``)."""
    from jaxpfl.algorithms import METHODS
    from jaxpfl.cli.app import GROUPS
    from jaxpfl.cli.every import by_name

    named = {name.removeprefix("jaxpfl "): command for name, command in by_name().items()}
    words: dict[str, list[str]] = {"": [*(n for n in named if " " not in n), *GROUPS, "bench", "--help", "--version"]}
    words |= {group: [*_below(group, named), "--help"] for group in GROUPS}
    choices: dict[str, list[str]] = {}
    for name, command in named.items():
        flags = flags_of(command)
        first = [choice for flag in flags if flag.positional for choice in flag.choices]
        first += list(METHODS) if name in _OF_METHODS else []
        words[name] = [*first, *(_given(flag) for flag in flags if not flag.positional), "--help"]
        choices |= {f"{name} {flag.name}": list(flag.choices) for flag in flags if flag.choices and not flag.positional}
        # A value that is not one of a few words is none of the command's words either.
        free = [flag for flag in flags if not (flag.positional or flag.choices or flag.many or flag.kind is bool)]
        choices |= {f"{name} {flag.name}": [] for flag in free}
    words["bench"] = [*importlib.import_module("jaxpfl.benchmarks.__main__").NAMES, "--help"]
    return words, choices


def _below(group: str, named: Iterable[str]) -> list[str]:
    return [name.removeprefix(f"{group} ") for name in named if name.startswith(f"{group} ")]


def _given(flag: Flag) -> str:
    return flag.off if flag.kind is bool and flag.default is True else flag.name


def _lookup(function: str, table: dict[str, list[str]]) -> str:
    """A shell function that prints the words of its argument, and fails where there are none known."""
    by_words: dict[str, list[str]] = {}
    for key, words in table.items():
        by_words.setdefault(" ".join(words), []).append(shlex.quote(key))
    cases = [f"    {'|'.join(keys)}) echo {shlex.quote(words)} ;;" for words, keys in by_words.items()]
    return "\n".join([f"{function}() {{", '  case "$1" in', *cases, "    *) return 1 ;;", "  esac", "}\n"])
