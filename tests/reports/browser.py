"""A real browser without a window, led through its DevTools pipe: no driver, no network."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PROGRAM = next(filter(None, map(shutil.which, NAMES)), None)

needs_browser = pytest.mark.skipif(
    PROGRAM is None, reason="no Chromium is installed (apt-get install chromium)"
)


class Browser:
    """One page in Chromium. `problems` are errors of the page; `requests` all that it loaded."""

    def __init__(self, profile: Path):
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
        ]
        # The browser reads from descriptor 3 and writes to descriptor 4.
        command = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", PROGRAM, *flags, "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._id = 0
        self._session = None
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        (page,) = [
            target
            for target in self.ask("Target.getTargets")["targetInfos"]
            if target["type"] == "page"
        ]
        session = self.ask("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = session["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method, **params):
        """Send a command and return what it gives."""
        self._id += 1
        message = {"id": self._id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._id:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer)

    def _next(self):
        while b"\0" not in self._buffer:
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, message):
        params = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(params["exceptionDetails"])[:500])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.problems.append(json.dumps(params["args"])[:500])
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.problems.append(params["entry"]["text"][:500])

    def open(self, path: Path, width=1300, height=900):
        """Load a file; return how many seconds it took until its pictures were drawn."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        begun = time.monotonic()
        self._loaded = False
        self.ask("Page.navigate", url=path.absolute().as_uri())
        while not self._loaded:
            self._note(self._next())
        self.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
        return time.monotonic() - begun

    def run(self, code):
        """Run JavaScript in the page and return its value."""
        answer = self.ask(
            "Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self, selector):
        return self.run(f"document.querySelector({json.dumps(selector)})?.textContent ?? null")

    def count(self, selector):
        """Return how many elements there are that can be seen."""
        return self.run(
            f"[...document.querySelectorAll({json.dumps(selector)})]"
            ".filter((each) => each.checkVisibility()).length"
        )

    def click(self, selector):
        """Click with the mouse, in the middle of an element."""
        x, y = self.run(
            f"(() => {{ const each = document.querySelector({json.dumps(selector)});"
            "each.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const box = each.getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def hover(self, selector, x_share, y):
        """Move the mouse to a place within an element."""
        left, top = self.run(
            f"(() => {{ const box = document.querySelector({json.dumps(selector)})"
            f".getBoundingClientRect(); return [box.x + box.width * {x_share}, box.y + {y}]; }})()"
        )
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=left, y=top)

    def press(self, *keys):
        """Press keys one after the other."""
        for key in keys:
            text = "\r" if key == "Enter" else key if len(key) == 1 else ""
            self.ask("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
            self.ask("Input.dispatchKeyEvent", type="keyUp", key=key)

    def close(self):
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    opened = Browser(tmp_path_factory.mktemp("browser"))
    yield opened
    opened.close()
