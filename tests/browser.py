"""Headless Chromium for tests of pages, over its DevTools protocol by pipe.

No driver and no package is needed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)

#: In the page: texts that lie over each other, that leave the window, their scrolling box or their picture.
FAULTS = """(() => {
  const found = [], texts = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; node = walker.nextNode();) {
    const text = node.data.trim(), range = document.createRange();
    if (!text || ['STYLE', 'TITLE', 'SCRIPT'].includes(node.parentElement.tagName.toUpperCase())) continue;
    range.selectNodeContents(node);
    const scroll = node.parentElement.closest('.scroll'), svg = node.parentElement.closest('svg');
    for (const box of range.getClientRects()) {
      texts.push([text, box, svg]);
      if (svg) {
        const all = svg.getBoundingClientRect();
        if (box.left < all.left - 1 || box.right > all.right + 1 || box.top < all.top - 1
            || box.bottom > all.bottom + 1) found.push('cut by its picture: ' + text);
      }
      const room = scroll ? scroll.getBoundingClientRect() : {left: 0, right: innerWidth};
      const width = scroll ? scroll.scrollWidth : innerWidth;
      if (box.left < room.left - 1 || box.right > room.left + width + 1)
        found.push('leaves the page: ' + text);
    }
  }
  for (let i = 0; i < texts.length; i++) for (let j = i + 1; j < texts.length; j++) {
    const [one, a, first] = texts[i], [two, b, second] = texts[j];
    // Labels side by side in a picture must not even touch.
    const least = first && first === second && Math.abs(a.top - b.top) < 2 ? -1 : 2;
    const x = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (x > least && y > 3) found.push('overlap: ' + one.slice(0, 50) + ' | ' + two.slice(0, 50));
  }
  if (document.documentElement.scrollWidth > innerWidth) found.push('the page is wider than the window');
  for (const each of document.querySelectorAll('*')) if (getComputedStyle(each).overflowX == 'hidden'
      && each.scrollWidth > each.clientWidth + 1 && each.clientWidth) found.push('cut: ' + each.tagName);
  const ground = getComputedStyle(document.body).backgroundColor;
  return JSON.stringify({found, texts: texts.length, ground});
})()"""


def chromium() -> str:
    """Return the path of a Chromium, or "" if none is installed."""
    return next(filter(None, map(shutil.which, NAMES)), "")


class Browser:
    """One page of one Chromium; a context manager.

    errors: what the console and the loader have reported since open().
    """

    def __init__(self, folder: Path):
        (read, self._in), (self._out, write) = os.pipe(), os.pipe()
        start = f'exec "$0" "$@" 3<&{read} 4>&{write}'
        words = [chromium(), *OPTIONS, "--remote-debugging-pipe", f"--user-data-dir={folder}"]
        silent = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        self._process = subprocess.Popen(
            ["bash", "-c", start, *words], pass_fds=(read, write), **silent
        )
        os.close(read)
        os.close(write)
        self._buffer, self._number, self._session, self.errors = b"", 0, "", []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: Any) -> None:
        os.close(self._in)
        self._process.kill()
        self._process.wait()
        os.close(self._out)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the result of a command, and keep the events that arrive before it."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._in, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "result" in answer, answer
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            more = os.read(self._out, 1 << 16)
            assert more, f"{chromium()} ended"
            self._buffer += more
        first, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(first)
        self._keep(message.get("method", ""), message.get("params", {}))
        return message

    def _keep(self, event: str, about: dict[str, Any]) -> None:
        if (
            event == "Runtime.exceptionThrown"
            or event == "Log.entryAdded"
            or event == "Runtime.consoleAPICalled"
        ):
            self.errors.append(json.dumps(about))
        url = about.get("request", {}).get("url", "data:")
        if event == "Network.requestWillBeSent" and not url.startswith(("data:", "file:")):
            self.errors.append(f"asked the network for {url}")

    def open(self, file: Path, width: int, dark: bool) -> dict[str, Any]:
        """Return what FAULTS reports of the page in a window of this width (CSS pixels)."""
        self.load(file, width, dark)
        return json.loads(self.evaluate(FAULTS))

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"][
            "value"
        ]

    def load(self, file: Path, width: int, dark: bool) -> None:
        """Load a page in a window so wide (CSS pixels)."""
        self.errors = []
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Page.navigate", url=file.as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def picture(self) -> str:
        """Return the whole page as PNG, base64."""
        return self.ask("Page.captureScreenshot", captureBeyondViewport=True)["data"]
