"""Runs of the toy federation in processes that die: started by test_resume.py, one process per case.

Reads a list of cases as JSON from stdin. A case says which run to start or go on with, and how it dies:
"after" (seconds until SIGKILL from outside), or "at" (name of an internal step, which call of it, and whether
before or after it), or by a fault of the method. Writes how each one ended.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
STEPS = {
    "save": ("fedloom.engine.checkpoint", "save_payload"),
    "meta": ("fedloom.engine.checkpoint", "write_json"),
    "sync": ("fedloom.engine.checkpoint", "sync_folder"),
    "prune": ("fedloom.engine.store:ClientStore", "prune"),
    "client": ("fedloom.engine.store:ClientStore", "save"),
    "row": ("fedloom.engine.folder:RunFolder", "append"),
    "commit": ("fedloom.engine.loop:Loop", "_commit"),
}


def arm(step: str, count: int, after: bool) -> None:
    """Make the `count`-th call of a step the last thing that this process does."""
    from importlib import import_module

    home, name = STEPS[step]
    module, _, owner = home.partition(":")
    target = import_module(module)
    target = getattr(target, owner) if owner else target
    inner, calls = getattr(target, name), [0]

    def dying(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == count and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = inner(*args, **kwargs)
        if calls[0] == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(target, name, dying)


def carry_out(case: dict[str, Any]) -> None:
    """The run of one case, in this process."""
    from toys.faults import Fault
    from toys.federation import experiment
    from toys.running import resume, start

    if "at" in case:
        arm(*case["at"])
    faults = tuple(Fault(**fault) for fault in case.get("faults", ()))
    whole = experiment("toys.faults:faulty", options={"faults": faults}, **case.get("plan", {}))
    path = Path(case["path"])
    begun = (path / "config.yaml").exists()
    if not begun:  # killed while the folder was being made
        shutil.rmtree(path, ignore_errors=True)
    go = resume if begun else start
    go(path, whole, **case.get("options", {}))


def main() -> None:
    """All cases, each in a fork of this process, which has imported what they need."""
    sys.path.insert(0, str(TESTS))
    import torch

    import toys.faults
    import toys.running  # noqa: F401

    torch.set_num_threads(1)
    ends = []
    for case in json.loads(sys.stdin.read()):
        child = os.fork()
        if child == 0:
            try:
                carry_out(case)
            except BaseException as error:
                print(repr(error), file=sys.stderr)
                os._exit(3)
            os._exit(0)
        if "after" in case:
            time.sleep(case["after"])
            os.kill(child, signal.SIGKILL)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(json.dumps(ends))


if __name__ == "__main__":
    main()
