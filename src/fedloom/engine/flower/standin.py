"""Take the place of one of Flower's console scripts: have a warm process run it, or run it where none is to be had.

Run as `python -I -S standin.py SOCKET REAL ARGUMENTS...`. It passes on its arguments, environment, folder and open
files, and ends with the exit code of the fork that did the work; see `warm.py`. Imports the standard library alone.
"""

from __future__ import annotations

import array
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

HEAD = 8  # bytes of a request's length
BEGUN = b"+"


def ask(path: str, request: Mapping[str, Any], files: Sequence[int] = (), patience: float | None = None) -> int | None:
    """Have a request served and return its exit code: 1 when the warm process is killed meanwhile.

    Returns None when nothing has been begun: nobody serves there, or who serves could not fork. files: descriptors
    that the fork gets as its standard input, output and error. patience: seconds until its work is given up with
    `TimeoutError`.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(patience)
        try:
            line.connect(path)
        except OSError:
            return None
        body = json.dumps(request).encode()
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
        try:
            line.sendmsg([len(body).to_bytes(HEAD, "little")], passed)
            line.sendall(body)
            if line.recv(len(BEGUN)) != BEGUN:
                return None
        except ConnectionError:
            return None
        try:
            answer = line.recv(1)
        except ConnectionError:
            answer = b""
    return answer[0] if answer else 1


def errand(real: str, arguments: Sequence[str], environment: Mapping[str, str], folder: str) -> dict[str, Any]:
    """The request to run a console script. real: its path, whose last part is its name."""
    return {"command": [real, *arguments], "environment": dict(environment), "folder": folder}


def settle(path: str) -> None:
    """Return when every fork is gone whose asker has gone away."""
    ask(path, {})


def main(path: str, real: str, arguments: Sequence[str]) -> int:
    """Have the script run, and return its exit code."""
    code = ask(path, errand(real, arguments, os.environ, os.getcwd()), (0, 1, 2))
    if code is None:
        os.execv(real, [real, *arguments])
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
