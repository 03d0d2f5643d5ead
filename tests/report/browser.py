"""Drive a headless Chromium over its debugging pipe, for tests of the page, with the standard library alone.

`--remote-debugging-pipe` speaks the DevTools protocol on file descriptors 3 (commands) and 4 (answers). Each message is
JSON with a zero byte after it, so there is no port and no websocket.
"""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE_S = 60.0  # This is the limit of one answer: two busy cores start a browser slowly.


def find_chromium():
    """Return the path of a Chromium on this machine, or None."""
    return os.environ.get("CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page in one browser.


    Attributes:
        problems: messages of exceptions and of console.error, so far.
    """

    def __init__(self, executable, profile: Path):
        ours, theirs = os.pipe(), os.pipe()  # We write commands to ours[1] and read answers from theirs[0].
        # A subshell puts the pipe ends on 3 and 4, whatever numbers they have here.
        flags = "--headless=new --no-sandbox --disable-gpu --no-first-run --hide-scrollbars --disable-dev-shm-usage"
        flags += " --disable-extensions --disable-background-networking --remote-debugging-pipe"
        command = f'exec "$0" {flags} --user-data-dir="$1" about:blank 3<&{ours[0]} 4>&{theirs[1]}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", command, executable, str(profile)],
            pass_fds=(ours[0], theirs[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(ours[0])
        os.close(theirs[1])
        self._commands, self._answers = ours[1], theirs[0]
        os.set_blocking(self._answers, False)
        self._buffer, self._id, self._session = b"", 0, None
        self.problems = []
        target = next(t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method, **params):
        """Send a DevTools command and return its result."""
        self._id += 1
        message = {"id": self._id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for answer in self._read():
                if answer.get("id") == self._id:
                    assert "error" not in answer, f"{method}: {answer['error']}"
                    return answer["result"]
                self._note(answer)
        raise TimeoutError(f"{method}: no answer in {PATIENCE_S} s")

    def _read(self):
        try:
            chunk = os.read(self._answers, 1 << 20)
        except BlockingIOError:
            time.sleep(0.005)
            return []
        assert chunk, "the browser has gone"
        *complete, self._buffer = (self._buffer + chunk).split(b"\0")
        return [json.loads(message) for message in complete]

    def _note(self, event):
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.problems.append(str([arg.get("value") or arg.get("description") for arg in params["args"]]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])

    def open(self, file: Path, width: int, height: int = 900):
        """Load a page at a width and wait until its charts are drawn."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.send("Page.navigate", url=file.resolve().as_uri())
        self.wait_for("document.body && document.body.dataset.ready === 'yes'")

    def evaluate(self, expression):
        """Return the value of a JavaScript expression; a promise is awaited."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression):
        """Wait until an expression is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"never true: {expression}; the page says {self.problems}"
            time.sleep(0.05)

    def mouse(self, kind, x, y, **more):
        """Send a mouse event: mouseMoved, mousePressed, mouseReleased or mouseWheel."""
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def screenshot(self, file: Path):
        """Write the whole page as a PNG."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        found = self.send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(found["data"]))

    def close(self):
        self._session = None
        try:
            self.send("Browser.close")
        except (AssertionError, OSError, TimeoutError):
            self._process.terminate()
        self._process.wait(30)
        os.close(self._commands)
        os.close(self._answers)
