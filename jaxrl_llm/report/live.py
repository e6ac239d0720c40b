"""Pages that follow runs in progress: `python -m jaxrl_llm.report RUN... --serve`.

A server on the standard library's sockets answers a few fixed addresses, and no part of an address
becomes a path: "/" and "/data" for the folders of the command line, and "/runs/N/" and
"/runs/N/data" for the N-th run that was found in them. It reads the files of the runs and writes
none. The page asks for its data every few seconds; as long as no file has changed, the answer is
empty.
"""

import base64
import contextlib
import hashlib
import hmac
import http.server
import io
import json
import math
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.devices.addresses import check_address
from jaxrl_llm.messages import one_line
from jaxrl_llm.report import TEMPLATES, page
from jaxrl_llm.report.comparison import page as page_lib
from jaxrl_llm.report.comparison.runs import find_runs, is_run
from jaxrl_llm.report.data import SOURCES, report_data
from jaxrl_llm.workdir import owner
from jaxrl_llm.workdir.bucket import address as addresses
from jaxrl_llm.workdir.bucket.copies import localize

EVERY_MS = 2000
"""Time between two questions of a page, in milliseconds."""

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
"""Names under which a browser may reach a server on this machine. A page of another site whose name
has been pointed here is refused, since it could read the answers."""

_PATIENCE_S = 30.0  # For the head of a request, and for a client to read a part of its answer.
_MOST_CONNECTIONS = 64  # Each of them has a thread.
_SOURCE = "The server of jaxrl_llm.report sends new rows as they are written."


class Followed(NamedTuple):
  """What a server shows.

  Attributes:
    folders: Folders of the command line, which may not exist yet.
    title: Title of a comparison.
    metrics: Metrics that get charts in addition to those of `curves.PANELS`.
    compares: Whether one run alone is a comparison, too.
    every_ms: Time between two questions of a page, in milliseconds.
  """

  folders: tuple[Path, ...]
  title: str = ""
  metrics: tuple[str, ...] = ()
  compares: bool = False
  every_ms: int = EVERY_MS


def local(folder: Path) -> Path:
  """Returns the folder of this machine in which the files of a workdir lie.

  What is new in a bucket is brought first. If nothing is there yet, or the storage fails, the
  folder stays as it is.

  Raises:
    MissingPackageError: If the workdir is in a bucket, and obstore is not installed.
  """
  if not addresses.is_address(folder):
    return folder
  with contextlib.suppress(ValueError):
    localize(folder, checkpoints=False)
  return addresses.mirror_of(addresses.parse(str(folder)), reads=True).run


def make_reader(followed: Followed) -> Callable[[str | None, str], dict[str, Any] | None]:
  """Makes the function that reads the runs.

  Returns:
    Function `(run, version) -> data` for the number of a run, or None for all folders. The data is
    None for a number that no run has, and empty if the version is still the newest.
  """
  known: list[Path] = []  # Runs in the order in which they were found: their numbers never change.
  lock = threading.Lock()  # Pages of several browsers are read one after another.

  def read(run: str | None, version: str) -> dict[str, Any] | None:
    with lock:
      folders = [local(folder) for folder in followed.folders]
      runs, _ = find_runs([folder for folder in folders if folder.is_dir()])
      known.extend([path for path in runs if path not in known])
      alone = len(folders) == 1 and not followed.compares and is_run(folders[0])
      if run is not None and int(run) >= len(known):
        return None
      members = known if run is None else [known[int(run)]]
      newest = _version(members, folders)
      if newest == version:
        return {}
      if not members:
        data = _nothing_yet(followed.folders)
      elif alone or run is not None:
        data = {"kind": "run"} | report_data(members[0])
      else:
        arms, notes = page_lib.load_arms(folders)
        link = lambda record: f"runs/{known.index(record.path)}/" if record.path in known else None
        options = dict(title=followed.title, link=link)
        try:
          data = page_lib.page_data(arms, notes, metrics=followed.metrics, **options)
        except ValueError as error:  # A metric that no run has, or has yet.
          data = page_lib.page_data(arms, [*notes, *str(error).splitlines()], **options)
        data = {"kind": "comparison"} | data
      return data | {"version": newest, "every_ms": followed.every_ms, "source": _SOURCE, "ended": _ended(data)}

  return read


def _version(runs: Sequence[Path], folders: Sequence[Path]) -> str:
  """Returns a name for the state of the runs' files and of the processes that write them."""
  parts: list[Any] = [[str(folder), folder.exists()] for folder in folders]
  for run in runs:
    for name in (*SOURCES, ".lock"):
      try:
        status = (run / name).stat()
        parts.append([str(run), name, status.st_size, status.st_mtime_ns, status.st_ino])
      except OSError:
        continue
    parts.append(owner.is_alive(run))
  return f'"{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]}"'


def _nothing_yet(folders: Sequence[Path]) -> dict[str, Any]:
  names = ", ".join(str(folder) for folder in folders)
  what = "no run in it yet" if any(folder.exists() for folder in folders) else "it does not exist yet"
  header = {"status": f"waiting: {what}", "workdir": names}
  return {"kind": "nothing yet", "header": header, "phases": {}, "samples": [], "config": {}, "versions": {}, "notes": []}


def _ended(data: Mapping[str, Any]) -> bool:
  """Returns whether no run of a page is in progress, as far as its files tell."""
  if data["kind"] == "comparison":
    return all(run["state"] in ("finished", "failed") for arm in data["arms"] for run in arm["runs"])
  status = str(data["header"].get("status"))
  return not status.startswith(("running", "waiting", "no summary"))


def build_live_page(data: Mapping[str, Any]) -> str:
  """Builds the page of a reader's data."""
  template, scripts = TEMPLATES["comparison" if data["kind"] == "comparison" else "run"]
  return page.build_page(template, (*scripts, "live.js"), data, asks_for_more=True)


class _Head(socket.SocketIO):
  """What a connection sends, with a limit on the time for the whole head of a request."""

  def __init__(self, connection: socket.socket):
    super().__init__(connection, "r")
    self.connection, self.deadline = connection, math.inf

  def begin(self) -> None:
    """Begins the time of a head."""
    self.deadline = time.monotonic() + _PATIENCE_S

  def readinto(self, buffer: Any) -> int | None:
    """Reads what has arrived, and waits for it until the deadline."""
    self.connection.settimeout(max(self.deadline - time.monotonic(), 1e-3))
    try:
      return self.connection.recv_into(buffer)
    finally:
      self.connection.settimeout(_PATIENCE_S)


def make_server(
  followed: Followed, *, host: str = "127.0.0.1", port: int = 0, api_key: str | None = None
) -> http.server.ThreadingHTTPServer:
  """Makes a server that is bound to its address; `serve_forever` runs it.

  Args:
    followed: What it shows.
    host: Address to listen on.
    port: Port, or 0 for a free one.
    api_key: Key that a browser asks for as a password; None for none, on this machine alone.

  Raises:
    OSError: If the address cannot be used.
    ValueError: If others reach the host and there is no key. One line.
  """
  check_address(host, api_key)
  read = make_reader(followed)
  names = dict.fromkeys([*LOOPBACK, f"[{host}]" if ":" in host else host.lower()])

  class Handler(http.server.BaseHTTPRequestHandler):
    """The answers to one connection."""

    timeout, protocol_version, server_version, sys_version = _PATIENCE_S, "HTTP/1.1", "jaxrl_llm", ""

    def setup(self) -> None:
      super().setup()
      self.head = _Head(self.connection)
      self.rfile = io.BufferedReader(self.head)

    def handle_one_request(self) -> None:
      self.head.begin()
      super().handle_one_request()

    def do_HEAD(self) -> None:
      self.do_GET()

    def do_GET(self) -> None:
      if self.headers.get("Transfer-Encoding") or self.headers.get("Content-Length", "0") != "0":
        self.close_connection = True  # The body would be taken for the next request.
        self.rfile.read1()  # Unread, it would reset the connection before the answer arrives.
      name = re.sub(r":\d*$", "", self.headers.get("Host") or "").lower()
      if api_key is None and name not in names:
        return self.reply(HTTPStatus.FORBIDDEN, f"found the host {name!r}, expected {' or '.join(names)}")
      if api_key is not None and not hmac.compare_digest(given_key(self.headers.get("Authorization", "")), api_key.encode()):
        return self.reply(HTTPStatus.UNAUTHORIZED, "found no key or a wrong one, expected that of the server as the password")
      route = re.fullmatch(r"/(?:runs/([0-9]{1,6})/)?(data)?", self.path)
      if route is None:
        return self.reply(HTTPStatus.NOT_FOUND, "there is no such page")
      version = self.headers.get("If-None-Match", "") if route[2] else ""
      try:
        data = read(route[1], version)
        if data is None:
          return self.reply(HTTPStatus.NOT_FOUND, "there is no such run")
        if not data:
          return self.reply(HTTPStatus.NOT_MODIFIED, "")
        if route[2]:
          return self.reply(HTTPStatus.OK, json.dumps(page.strict(data), allow_nan=False), "application/json")
        return self.reply(HTTPStatus.OK, build_live_page(data), "text/html")
      # Whatever a half-written or damaged file causes, the next question may succeed.
      except Exception as error:
        return self.reply(HTTPStatus.INTERNAL_SERVER_ERROR, one_line(error))

    def reply(self, status: HTTPStatus, text: str, kind: str = "text/plain") -> None:
      body = text.encode("utf-8", "backslashreplace")
      self.send_response(status)
      headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
      headers |= {"Cross-Origin-Resource-Policy": "same-origin", "X-Frame-Options": "DENY"}
      if status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = 'Basic realm="runs", charset="UTF-8"'
      if self.close_connection:
        headers["Connection"] = "close"
      if status != HTTPStatus.NOT_MODIFIED:
        headers |= {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
      for name, value in headers.items():
        self.send_header(name, value)
      self.end_headers()
      if status != HTTPStatus.NOT_MODIFIED and self.command != "HEAD":
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
      """Says nothing: a page asks every few seconds."""

  class Server(http.server.ThreadingHTTPServer):
    """The server; a browser that goes away in the middle of an answer is no error."""

    daemon_threads = True
    address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
    places = threading.BoundedSemaphore(_MOST_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
      if self.places.acquire(blocking=False):
        super().process_request(request, client_address)
      else:
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
      try:
        super().process_request_thread(request, client_address)
      finally:
        self.places.release()

    def handle_error(self, *_: Any) -> None:
      """Says nothing."""

  return Server((host, port), Handler)


def given_key(header: str) -> bytes:
  """Returns the password or token of an Authorization header; b"" for none.

  Example:
    >>> given_key("Basic bWU6c2VjcmV0"), given_key("bearer secret"), given_key("Basic ?")
    (b'secret', b'secret', b'')
  """
  scheme, _, value = header.partition(" ")
  if scheme.lower() == "bearer":
    return value.strip().encode()
  try:
    return base64.b64decode(value, validate=True).partition(b":")[2] if scheme.lower() == "basic" else b""
  except ValueError:
    return b""


def address(server: http.server.ThreadingHTTPServer) -> str:
  """Returns the address of a server for a browser."""
  host, port = server.server_address[:2]
  return f"http://{f'[{host}]' if ':' in str(host) else host}:{port}/"
