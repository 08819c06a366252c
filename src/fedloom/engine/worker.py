"""Main function of a worker process: rebuild the experiment, then carry out instructions until the pipe closes.

Started as `python -m fedloom.engine.worker FOLDER K`, so the user's main module is not imported again and needs
no guard. It ends when its parent ends, however that happened.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from pathlib import Path

import torch

from fedloom.engine.runtime import Runtime
from fedloom.engine.serial import receive, send
from fedloom.engine.spool import Reader, Spool
from fedloom.engine.store import ClientStore


def main(folder: Path, k: int) -> None:
    """Serve the parent over stdin and stdout; what user code prints goes to stderr."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    inward, outward = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    recipe, path = receive(inward)
    sys.path[:] = path
    try:
        experiment = pickle.loads(recipe)()
        torch.set_num_threads(experiment.threads)
        spool = Spool(folder / ".spool" / f"{k}.bin")
        runtime = Runtime(experiment, ClientStore(folder / "clients"), spool, folder / "log.txt")
    except Exception as error:
        send(outward, f"{type(error).__name__}: {error}")
        return
    send(outward, None)
    reader, generation = Reader(), -1
    while True:
        exchange, instruction, ref = receive(inward)
        if exchange != generation:
            generation = exchange
            spool.reset()
        send(outward, runtime.carry_out(instruction, reader.open(ref)))
        reader.forget()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), int(sys.argv[2]))
    except (EOFError, BrokenPipeError):
        os._exit(0)
