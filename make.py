"""Set up FedLoom beside its sources and use it: `python3 make.py run` or `python3 make.py test`.

Makes `.venv` in this folder once, installs the project in it (again only when pyproject.toml changes), then

run  [ARGS]   runs `fedloom run ARGS`: the quickstart when no argument is given
test [ARGS]   checks style and types and runs the tests; ARGS go to pytest, and then only pytest runs

test-oldest-flower [ARGS]   runs the tests of the engine on Flower with the oldest version that pyproject.toml admits,
              in an environment of their own below `.venv`; ARGS go to pytest (`-m slow` runs the simulation on Ray)
"""

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")


def call(*command: object) -> None:
    """Run a command in the project's folder; its failure is ours."""
    process = subprocess.Popen([str(part) for part in command], cwd=ROOT)
    stopped = False
    while True:
        try:
            code = process.wait()
            break
        except KeyboardInterrupt:  # Ctrl-C has reached the command too, which ends in its own time
            stopped = True
    if code:
        sys.exit(130 if stopped or code == -2 else code)


def install(extra: str, python: Path = PYTHON, pin: str = "") -> None:
    """Make the environment and install the project in it, unless that was done for this pyproject.toml.

    pin: a further requirement, such as an old version of something.
    """
    venv = python.parents[1]
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest() + pin
    done = venv / f"installed-{extra or 'core'}.txt"
    enough = [done, venv / "installed-dev.txt"]
    if python.exists() and any(file.is_file() and file.read_text() == wanted for file in enough):
        return
    if not python.exists():
        print(f"setting up {venv.relative_to(ROOT)}", flush=True)
        if subprocess.run([sys.executable, "-m", "venv", str(venv)]).returncode:
            sys.exit("error: Python's venv module is missing; install it (on Debian: apt-get install python3-venv)")
    print("installing FedLoom and what it needs; the first time takes some minutes", flush=True)
    project = ["-e", f".[{extra}]" if extra else ".", *([pin] if pin else [])]
    call(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *project)
    done.write_text(wanted)


def test_oldest_flower(rest: list[str]) -> None:
    """Run the tests that touch Flower with the oldest version that is promised to do."""
    oldest = re.search(r'^flower = \["flwr>=([0-9.]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    if oldest is None:
        sys.exit("error: pyproject.toml names no oldest version of flwr")
    python = VENV / "oldest-flower" / PYTHON.relative_to(VENV)
    install("dev,flower-sim", python, f"flwr=={oldest[1]}.*")
    call(python, "-m", "pytest", "tests/engine/flower", "tests/conformance", "-k", "flower or grid", *rest)


def main(arguments: list[str]) -> None:
    """Carry out one of the commands."""
    if sys.version_info < (3, 11):  # noqa: UP036 - whatever python3 is there runs this file
        sys.exit(f"error: FedLoom needs Python 3.11 or newer, this is {sys.version.split()[0]}")
    what, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if what == "run":
        install("")
        call(PYTHON, "-m", "fedloom", "run", *rest)
    elif what == "test":
        install("dev")
        if not rest:
            call(PYTHON, "-m", "ruff", "check", ".")
            call(PYTHON, "-m", "ruff", "format", "--check", ".")
            call(PYTHON, "-m", "mypy")
        call(PYTHON, "-m", "pytest", *rest)
    elif what == "test-oldest-flower":
        test_oldest_flower(rest)
    else:
        sys.exit(f"usage: python3 make.py run|test|test-oldest-flower [ARGS]\n\n{__doc__}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
