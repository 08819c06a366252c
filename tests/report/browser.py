"""A headless Chromium, driven through its pipe (Chrome DevTools Protocol: JSON, a zero byte after each message)."""

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
PATIENCE = 60  # seconds for an answer
# The browser reads commands from 3 and answers to 4.
START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)


def find():
    """Path of the browser; None where none is installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One browser with one page. Use as a context manager.

    requests: addresses asked for since the last `visit`; complaints: what the console said and the errors since then.
    """

    def __init__(self, path, home):
        ours, theirs = _pipe(), _pipe()
        command = [path, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={home}", "about:blank"]
        start = [sys.executable, "-ISc", START, str(ours[0]), str(theirs[1]), *command]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(start, pass_fds=(ours[0], theirs[1]), **quiet)
        os.close(ours[0])
        os.close(theirs[1])
        self.out, self.into, self.rest, self.count, self.session = ours[1], theirs[0], b"", 0, None
        self.requests, self.complaints, self.loaded = [], [], False

    def __enter__(self):
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Network", "Runtime", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()
        os.close(self.out)
        os.close(self.into)

    def call(self, method, **params):
        """Result of a command."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self.count:
                assert "error" not in answer, answer
                return answer["result"]

    def visit(self, url, width, *, dark=False):
        """Load a page at a width in CSS pixels and wait until it is there."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", media="", features=scheme)
        self.requests, self.complaints, self.loaded = [], [], False
        self.call("Page.navigate", url=url)
        while not self.loaded:
            self._read()

    def evaluate(self, expression):
        """Value of an expression of JavaScript; None for undefined."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def _read(self):
        """The next message; what a page did is noted on the way."""
        end = time.monotonic() + PATIENCE
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.into], [], [], max(0.0, end - time.monotonic()))
            found = os.read(self.into, 1 << 20) if ready else b""
            assert found, "the browser has ended or does not answer"
            self.rest += found
        text, _, self.rest = self.rest.partition(b"\0")
        message = json.loads(text)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event, told):
        if event == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif event in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.complaints.append(told)
        elif event == "Page.loadEventFired":
            self.loaded = True


def _pipe():
    """A pipe whose ends have numbers above those that the browser takes for itself."""
    ends = []
    for end in os.pipe():
        ends.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10))
        os.close(end)
    return ends
