"""A page in headless Chromium, driven through its debugging pipe."""

import base64
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

FLAGS = (
  "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
  "--disable-component-update --disable-sync"
).split()
# The browser reads from descriptor 3 and writes to 4.
LAUNCHER = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 20) for number in sys.argv[1:3]]
for pipe, number in zip(pipes, (3, 4)):
  os.dup2(pipe, number)
os.execvp(sys.argv[3], sys.argv[3:])
"""
HAS_CHROMIUM = shutil.which("chromium") is not None


class Page:
  """A page that is open.

  Attributes:
    requests: Addresses that the page has asked for.
    problems: Errors and warnings of its console.
  """

  def __init__(self, to_browser: int, from_browser: int):
    self.requests: list[str] = []
    self.problems: list[str] = []
    self._to, self._from, self._buffer, self._number, self._session = to_browser, from_browser, b"", 0, None

  def open(self, url: str) -> None:
    """Opens an address."""
    target = self.call("Target.createTarget", url="about:blank")["targetId"]
    self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    for domain in ("Page", "Runtime", "Network", "Log"):
      self.call(f"{domain}.enable")
    self.call("Page.navigate", url=url)
    self.wait("document.readyState === 'complete'")

  def run(self, script: str):
    """Evaluates an expression and returns its value."""
    answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
    assert "exceptionDetails" not in answer, answer
    return answer["result"].get("value")

  def wait(self, script: str, seconds: float = 20) -> None:
    """Waits until an expression holds."""
    end = time.monotonic() + seconds
    while not self.run(script):
      assert time.monotonic() < end, f"it never came true: {script}; {self.problems}"
      time.sleep(0.05)

  def type(self, selector: str, text: str) -> None:
    """Types text into a field."""
    self.run(f"document.querySelector({json.dumps(selector)}).focus()")
    self.call("Input.insertText", text=text)

  def press_enter(self) -> None:
    """Presses the enter key."""
    for kind, text in (("keyDown", "\r"), ("keyUp", "")):
      self.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text=text)

  def point(self, selector: str, *, click: bool = False) -> None:
    """Moves the mouse to an element, and clicks on it if asked to."""
    find = f"const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'nearest'}});"
    x, y = self.run(f"(() => {{ {find} const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2] }})()")
    self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    for kind in ("mousePressed", "mouseReleased") if click else ():
      self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

  def picture(self, path: Path) -> None:
    """Saves a picture of the page."""
    path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

  def call(self, method: str, **params):
    """Calls a method of Chromium's debugging protocol."""
    self._number += 1
    message = {"id": self._number, "method": method, "params": params} | ({"sessionId": self._session} if self._session else {})
    os.write(self._to, json.dumps(message).encode() + b"\0")
    while True:
      answer = self._receive()
      if answer.get("id") == self._number:
        assert "error" not in answer, answer
        return answer["result"]

  def _receive(self):
    while b"\0" not in self._buffer:
      part = os.read(self._from, 2**20)
      assert part, "the browser has ended"
      self._buffer += part
    line, _, self._buffer = self._buffer.partition(b"\0")
    message = json.loads(line)
    method, params = message.get("method"), message.get("params", {})
    if method == "Network.requestWillBeSent":
      self.requests.append(params["request"]["url"])
    elif method == "Log.entryAdded":
      self.problems.append(params["entry"]["text"])
    elif method in ("Runtime.exceptionThrown", "Page.javascriptDialogOpening"):
      self.problems.append(json.dumps(params))
    return message


@contextlib.contextmanager
def browsing(url: str, folder: Path):
  """Yields a page that shows an address, and ends the browser.

  Args:
    url: Address to open.
    folder: Folder for the browser's profile.
  """
  read_ours, write_theirs = os.pipe()
  read_theirs, write_ours = os.pipe()
  chromium = ["chromium", *FLAGS, "--remote-debugging-pipe", "--window-size=1100,900", f"--user-data-dir={folder / 'profile'}"]
  command = [sys.executable, "-c", LAUNCHER, str(read_theirs), str(write_theirs), *chromium]
  quiet = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
  browser = subprocess.Popen(command, pass_fds=(read_theirs, write_theirs), **quiet)
  os.close(read_theirs)
  os.close(write_theirs)
  try:
    page = Page(write_ours, read_ours)
    page.open(url)
    yield page
  finally:
    os.close(write_ours)  # The end of its input ends the browser.
    try:
      browser.wait(timeout=10)
    except subprocess.TimeoutExpired:
      browser.kill()
      browser.wait()
    os.close(read_ours)


def drawn(path: Path, folder: Path) -> str:
  """Returns the elements of a page in a file as its scripts have made them, without its data."""
  flags = [*FLAGS, "--virtual-time-budget=2000", "--dump-dom", f"--user-data-dir={folder / 'profile'}"]
  dom = subprocess.run(["chromium", *flags, path.as_uri()], capture_output=True, text=True, timeout=60).stdout
  return re.sub(r'<script type="application/json".*?</script>', "", dom, flags=re.S)
