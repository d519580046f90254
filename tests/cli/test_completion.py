"""The completion scripts, which tyro makes: valid, with every command and flag."""

import shutil
import subprocess

import pytest
from command import jaxpfl

from jaxpfl.cli.app import command_table
from jaxpfl.cli.parsing import flags_of


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_script_is_valid_and_names_every_command_and_flag(capsys, shell: str):
    found = jaxpfl(capsys, "completion", shell)
    assert (found.status, found.err) == (0, "")
    if program := shutil.which(shell):
        told = subprocess.run([program, "-n"], input=found.out, capture_output=True, text=True, timeout=60)
        assert (told.returncode, told.stderr) == (0, "")
    for name, command in command_table().items():
        assert name.split()[-1] in found.out
        given = {flag.name for flag in flags_of(command) if not flag.positional and flag.default is not True}
        assert [flag for flag in given if flag not in found.out] == [], name
