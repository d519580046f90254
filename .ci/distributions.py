"""Check what a wheel and a source distribution hold against the files that git knows: none missing, none astray."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOT_RELEASED = (".gitignore", ".github/")
"""Files of the repository that say nothing outside of it."""
MADE = ("PKG-INFO", "setup.cfg", "jaxpfl.egg-info/")
"""What building a source distribution adds."""


def expected_in_wheel(tracked: set[str]) -> set[str]:
    """The package with its data, and the benchmarks as a package in it."""
    package = {name for name in tracked if name.startswith("jaxpfl/")}
    data = ("benchmarks/papers/measured/", "benchmarks/winners/map.json")
    modules = {n for n in tracked if n.startswith("benchmarks/") and (n.endswith(".py") or n.startswith(data))}
    return package | {f"jaxpfl/{name}" for name in modules}


def difference(what: str, found: set[str], expected: set[str]) -> list[str]:
    """A line for each file that one side lacks."""
    return [f"{what} lacks {name}" for name in sorted(expected - found)] + [
        f"{what} also holds {name}" for name in sorted(found - expected)
    ]


def main(folder: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, stdout=subprocess.PIPE)
    if listed.returncode:  # an archive of the repository, not a checkout
        print("git lists no files here: what the distributions hold is not compared")
        return
    tracked = set(listed.stdout.splitlines())
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if ".dist-info/licenses/" in name]
    with tarfile.open(source) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    in_source = {name for name in names if not name.startswith(MADE)}
    wrong = difference("the wheel", in_wheel, expected_in_wheel(tracked))
    wrong += difference("the source", in_source, {name for name in tracked if not name.startswith(NOT_RELEASED)})
    wrong += ["the wheel holds no licence"] * (not licences)
    if wrong:
        raise SystemExit("\n".join(wrong))
    print(f"{wheel.name}: {len(in_wheel)} files; {source.name}: {len(in_source)} files")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
