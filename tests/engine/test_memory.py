"""Memory of a run, measured in processes of their own: it grows neither with rounds nor with the cohort."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MEASURE = """
import gc, json, sys, tempfile, threading, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import torch
torch.set_num_threads(1)
from toys.federation import experiment
from toys.running import Notes, start

def resident():
    with open("/proc/self/statm") as file:
        pages = file.read().split()
    return (int(pages[1]) - int(pages[2])) * 4096  # without pages of files: those belong to the system's cache

given = json.loads(sys.argv[2])
seen, peak, done = [], [0], threading.Event()

class Watch(Notes):
    def round_done(self, row):
        seen.append(resident())

def sample():
    while not done.is_set():
        peak[0] = max(peak[0], resident())
        time.sleep(0.0005)

plan = dict(num_stages=1, num_classes=2, per_class=4, cohort=1.0, rounds=given["rounds"], num_clients=given["clients"])
options = dict(values=[1.0] * given["clients"], size=given["size"])
with tempfile.TemporaryDirectory() as folder:
    start(Path(folder) / "warm", experiment("toys.scripted:drifting", **{**plan, "rounds": 1},
          options={**options, "size": 10}), checkpoint_every=0)
    base = resident()
    thread = threading.Thread(target=sample)
    thread.start()
    start(Path(folder) / "run", experiment("toys.scripted:drifting", options=options, **plan), [Watch()],
          checkpoint_every=given["checkpoints"])
    done.set()
    thread.join()
print(json.dumps({"rounds": seen, "peak": peak[0] - base}))
"""
TESTS = Path(__file__).resolve().parents[1]


def measure(**given: int) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(TESTS), json.dumps({"checkpoints": 1, **given})],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_thirty_rounds_do_not_take_more_memory_than_five():
    found = measure(rounds=30, clients=8, size=262_144)["rounds"]
    assert len(found) == 30
    assert found[-1] - found[5] < 5e6


def test_the_server_holds_one_reply_whatever_the_cohort():
    """40 clients of 10 MB. In the process: old and new state, one upload, the network, the merge's accumulator."""
    ten = 10 * 2**20
    few = measure(rounds=1, clients=4, size=ten // 4, checkpoints=0)["peak"]
    many = measure(rounds=1, clients=40, size=ten // 4, checkpoints=0)["peak"]
    assert many < 9 * ten
    assert many < few + 3 * ten, "the peak grows with the cohort"  # 36 replies more would be 36 * ten
