"""A trace of an RL step: its phases, the named scopes of its programs, and its files."""

import gzip
import json

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.run.observe.profiling import Profiler
from tests.runs import VARIED, run_here, tiny_config

PHASES = ("weight_sync", "rollout", "reward", "old_logprobs", "advantages", "update")


def events(folder) -> list[dict]:
  (path,) = folder.glob("plugins/profile/*/perfetto_trace.json.gz")
  return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


@pytest.mark.slow
def test_a_run_leaves_a_trace_with_its_phases_and_scopes(tmp_path):
  short = {"num_steps": 1, "warm_start.num_steps": 0, "learner.updates_per_rollout": 1, "learner.row_buckets": (16,)}
  run_here(tiny_config(overrides=VARIED | short | {"profile.start": 1}), tmp_path)
  traced = events(tmp_path / "profile")
  spans = {e["name"]: e for e in traced if e.get("ph") == "X" and e["name"] in ("rl_step", *PHASES)}
  assert spans.keys() == {"rl_step", *PHASES}
  assert [e.get("name") for e in traced].count("rl_step") == 1
  step = spans["rl_step"]
  begins = [spans[name]["ts"] for name in PHASES]
  assert begins == sorted(begins) and step["ts"] <= begins[0]
  assert all(spans[name]["ts"] + spans[name]["dur"] <= step["ts"] + step["dur"] for name in PHASES)
  (path,) = (tmp_path / "profile").glob("plugins/profile/*/*.xplane.pb")
  names = path.read_bytes()  # xprof reads the scopes from the names of the operations in this file.
  assert [scope for scope in (b"embed", b"attention", b"mlp", b"head", b"loss", b"optimizer") if scope not in names] == []


def test_only_the_requested_steps_are_traced(tmp_path, monkeypatch):
  calls = []
  monkeypatch.setattr(jax.profiler, "start_trace", lambda *args, **options: calls.append("start"))
  monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
  profiler = Profiler(tmp_path, start=2, num_steps=2)
  for step in range(1, 6):
    profiler.step(step)
    profiler.phase("rollout")
    calls.append(step)
  profiler.close()
  assert calls == [1, "start", 2, 3, "stop", 4, 5]
  calls.clear()
  for profiler in (Profiler(None, start=0, num_steps=1), Profiler(tmp_path, start=1, num_steps=9)):
    profiler.step(1)
    profiler.close()
  assert calls == ["start", "stop"]


@pytest.mark.parametrize("name", ["embed", "attention", "mlp", "head"])
def test_scopes_are_in_the_names_of_operations(name):
  from jaxrl_llm.models import make_model, preset

  model = make_model(preset("nano", vocab_size=264))
  tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
  text = jax.jit(model.logits).lower(jax.eval_shape(model.init, jax.random.key(0)), tokens, tokens, tokens).as_text(debug_info=True)
  assert f"{name}/" in text
