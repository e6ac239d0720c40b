"""Memory traffic of a layer of experts, as libtpu compiles it."""

import importlib.util
import json
import subprocess
import sys

import pytest

from experiments.pod import mixture
from tests.experiments.test_compile_for_pod import environment
from tests.runs import ROOT

ARGUMENTS = ["--config=configs/gspo.py:qwen3-30b-a3b", "--topology=v5p:2x2x2", "--config.mesh.expert=4"]


@pytest.mark.slow
def test_a_dense_model_is_refused(capsys):
  assert mixture.main(["--config=configs/gspo.py:qwen3-0.6b", "--topology=v5p:2x2x2"]) == 2
  assert capsys.readouterr().err == "error: config.model.preset: found 'qwen3-0.6b', expected a mixture of experts\n"


@pytest.mark.exhaustive
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the package libtpu is not installed")
def test_a_layer_moves_no_more_than_its_products_take(tmp_path):
  """Copies of all tokens on every device took 2.5 times as long as the products."""
  command = [sys.executable, "-m", "experiments.pod.mixture", *ARGUMENTS, f"--json={tmp_path}/numbers"]
  result = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
  assert result.returncode == 0, result.stderr[-2000:]
  numbers = json.loads((tmp_path / "numbers").read_text())
  for of_pass in (numbers["forward"], numbers["backward"]):
    assert 0.8 < of_pass["ratio"] < 1.5 and 1 <= of_pass["excess"] < 1.1
