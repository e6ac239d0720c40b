"""What README.md shows is true: its code runs, and what it names exists."""

import inspect
import pathlib
import re

import pytest

from jaxrl_llm import objectives

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def python_code():
  return re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_the_code_of_models_runs(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  code, _, _ = python_code()
  scope: dict = {}
  exec(code, scope)
  assert scope["logits"].shape == (1, 3, 512) and (tmp_path / "exported" / "model.safetensors").exists()
  sizes = len(set(scope["models"].PRESETS) - {"tiny", "nano", "tiny-moe", "nano-moe"})
  assert f"{sizes} published sizes" in code


def test_the_code_of_the_sampler_runs():
  _, code, _ = python_code()
  scope: dict = {}
  exec(code, scope)
  lengths, rollouts = scope["lengths"], scope["rollouts"]
  assert rollouts.tokens.shape == rollouts.logprobs.shape == (12, 32)
  assert all(1 <= length <= limit for length, limit in zip(lengths.tolist(), range(20, 32), strict=True)) and max(lengths) > 19


def test_the_code_of_objectives_runs():
  _, _, code = python_code()
  scope: dict = {}
  exec(code, scope)
  assert scope["grads"].shape == (2, 3)
  assert float(scope["loss"]) != 0


def test_the_setting_it_calls_an_error_is_one():
  with pytest.raises(ValueError, match="tau_pos"):
    objectives.make("gspo", tau_pos=1.0)


def test_everything_it_names_exists():
  paths = re.findall(r"--config=(configs/\w+\.py)|\]\((experiments/[\w./]+)\)|`((?:jaxrl_llm|configs|experiments)/[\w./]*)`", README)
  named = [next(filter(None, groups)) for groups in paths]
  assert len(named) > 10
  missing = [path for path in named if not (ROOT / path).exists()]
  assert not missing


# What the gate's column begins with, and the settings whose defaults it then shows, in their order.
SHOWN = {
  "none": (),
  "any": (),
  "hard clip": ("clip_low", "clip_high"),
  "soft": ("tau_pos", "tau_neg"),
  "capped weight, 1 +": ("clip_high",),
  "geometric clip": ("log_clip_low", "log_clip_high"),
  "gamma weight": ("k_pos", "lambda_pos", "k_neg", "lambda_neg"),
  "ball": ("delta_low", "delta_high"),
  "prefix budget": ("budget", "delta"),
  "Gaussian": ("sigma", "alpha", "beta"),
}


def test_the_table_of_objectives_holds_the_defaults():
  rows = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \| [^|]+ \|$", README, flags=re.MULTILINE))
  assert set(rows) <= set(objectives.OBJECTIVES) and len(rows) >= 21
  for name, gate in rows.items():
    defaults = {key: p.default for key, p in inspect.signature(objectives.OBJECTIVES[name]).parameters.items()}
    (kind,) = (kind for kind in SHOWN if gate.startswith(kind))
    shown = tuple(float(x) for x in re.findall(r"\d[\d.]*(?:e-\d)?", gate.removeprefix(kind)))
    assert shown == tuple(defaults[key] for key in SHOWN[kind]), name
