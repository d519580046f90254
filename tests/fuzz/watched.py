"""Prints the audit events of unpickling, programs and libraries in reading good folders; a last one is on purpose."""

from __future__ import annotations

import json
import pickle
import sys
import tempfile
from pathlib import Path

import folder_targets
import fuzz
import good_runs

WATCHED = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "ctypes.dlopen")

if __name__ == "__main__":
    seen: list[str] = []
    with tempfile.TemporaryDirectory() as place:
        folder_targets.GOOD = Path(place)
        fuzz.alone(lambda: good_runs.make(Path(place)))
        watching = False
        sys.addaudithook(lambda event, args: seen.append(f"{event} {args}") if watching and event in WATCHED else None)
        for name, target in folder_targets.FOLDERS.items():
            folder = Path(place, "copies", name)
            folder.mkdir(parents=True)
            target.begin(folder)
            watching = False
            target.read(folder)  # libraries load what they need at the first
            watching = True
            target.read(folder)
            watching = False
    watching = True
    pickle.loads(pickle.dumps(Path))  # which is seen, if anything would be
    print(json.dumps(seen))
