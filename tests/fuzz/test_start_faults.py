"""Faults of a model's folder, each reported in one line before any of its weights is read."""

import shutil
import time

import pytest

from jaxrl_llm import main
from jaxrl_llm.run.setup import experiment
from tests.runs import ROOT, tiny_config

MODEL = ROOT / "tests" / "models" / "checkpoints" / "qwen3"
TOKENIZER = ROOT / "tests" / "pretrained" / "tokenizers" / "qwen3"


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """A checkpoint with a tokenizer, whose weights must not be read."""
  monkeypatch.setattr(experiment, "build_experiment", None)
  shutil.copytree(MODEL, tmp_path / "model")
  for path in TOKENIZER.iterdir():
    shutil.copyfile(path, tmp_path / "model" / path.name)
  return tmp_path / "model"


FAULTS = {
  "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), ("found no tokenizer", "tokenizer.json")),
  "a damaged tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{"), ("damaged tokenizer",)),
  "no config": (lambda folder: (folder / "config.json").unlink(), ("config.json",)),
  "a vocabulary larger than the embedding": (lambda folder: None, ("has ids up to 151668", "embedding")),
  "no folder, no network": (shutil.rmtree, ("does not exist", "check the path")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_line_within_seconds(fault, folder):
  spoil, words = FAULTS[fault]
  spoil(folder)
  begun = time.process_time()
  (line,) = main.config_problems(tiny_config("gspo", {"model.path": str(folder)}))
  assert time.process_time() - begun < 5
  assert len(line) < 500 and all(word in line for word in words), line
