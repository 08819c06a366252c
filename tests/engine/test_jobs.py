"""Jobs in processes of their own: what they say, how they end, how they are stopped."""

import io
import os
import pickle
import signal
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import pytest

from fedloom.engine.jobs import Jobs
from fedloom.engine.serial import send
from toys import jobs as toys


def ended(jobs, count):
    """The last message of that many jobs, by name, and all notes."""
    last, notes = {}, []
    while len(last) < count:
        name, kind, value = jobs.wait()
        if kind == "note":
            notes.append((name, value))
        else:
            last[name] = kind, value
    return last, notes


def test_jobs_answer_fail_and_die_by_themselves():
    with Jobs() as jobs:
        for name, job in (("sum", partial(toys.add, 2, 3)), ("error", toys.fail), ("gone", toys.vanish)):
            jobs.start(name, pickle.dumps(job))
        assert set(jobs.running) == {"sum", "error", "gone"}
        last, notes = ended(jobs, 3)
        assert not jobs.running
    assert last == {
        "sum": ("ended", 5),
        "error": ("died", "ValueError: bad luck"),
        "gone": ("died", "its process died"),
    }
    assert notes == [("sum", "2 + 3")]


def test_an_answer_that_cannot_be_read_is_the_end_of_its_job():
    with Jobs() as jobs:
        jobs.start("odd", pickle.dumps(toys.give_a_two_part_error))
        last, notes = ended(jobs, 1)
        assert not jobs.running
    told = "its answer cannot be read (TypeError: TwoPart.__init__() missing 1 required positional argument: 'value')"
    assert (last, notes) == ({"odd": ("died", told)}, [("odd", "begun")])


@pytest.mark.parametrize(
    "error", [AttributeError, ImportError, ValueError, RuntimeError, SystemExit, EOFError, OSError]
)
def test_whatever_reading_raises_is_told(error):
    answer = io.BytesIO()
    send(answer, ("ended", toys.Unreadable(error)))
    jobs, process = Jobs(), SimpleNamespace(stdin=io.BytesIO(), stdout=io.BytesIO(answer.getvalue()))
    jobs._listen("odd", process, b"")
    lost = error in (EOFError, OSError)
    told = "its process died" if lost else f"its answer cannot be read ({error.__name__}: broken)"
    assert jobs._said.get_nowait() == ("odd", "died", told)


def until(path):
    for _ in range(1200):
        if path.exists():
            return
        time.sleep(0.05)
    raise AssertionError(f"{path} never came")


PARENT = """
import pickle, signal, sys
from functools import partial
from fedloom.engine.jobs import Jobs
from toys import jobs as toys
signal.signal(signal.SIGINT, getattr(signal, sys.argv[2]))
with Jobs() as jobs:
    jobs.start("wait", pickle.dumps(partial(toys.wait, sys.argv[1])))
    jobs.wait()
"""


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("inherited", ["SIG_DFL", "SIG_IGN"], ids=["in front", "in the background of a shell"])
def test_jobs_stop_when_their_parent_is_killed(tmp_path, inherited):
    where = os.path.dirname(os.path.dirname(toys.__file__))
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), inherited], env={**os.environ, "PYTHONPATH": where}
    )
    until(tmp_path / "begun")
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    until(tmp_path / "stopped")
