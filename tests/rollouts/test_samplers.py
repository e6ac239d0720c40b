"""Samplers made from a config: the end of a response, and the memory of a device."""

import jax
import pytest

from configs import common
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.models import make_model, preset
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.rollouts import samplers
from tests.runs import tiny_config


def config_of(**rollout):
  config = common.laptop("gspo", "tiny")
  with config.unlocked():
    config.rollout.update(rollout)
  return config


def model_of(name="tiny", **axes):
  mesh = mesh_lib.make_mesh(**axes)
  return make_model(preset(name, vocab_size=264), mesh=mesh)


def test_a_cpu_device_has_its_share_of_the_machines_memory():
  device = jax.devices()[0]
  alone, shared = samplers.memory_limit(device, 1), samplers.memory_limit(device, 8)
  assert alone > 2**28 and abs(alone - 8 * shared) < 8


def test_a_container_may_have_less_than_the_machine(monkeypatch, tmp_path):
  device, files = jax.devices()[0], [tmp_path / name for name in ("memory.max", "limit_in_bytes", "none")]
  monkeypatch.setattr(samplers, "_CONTROL_GROUPS", files)
  machine = samplers.memory_limit(device, 1)
  files[0].write_text("max\n")
  files[1].write_text(f"{2**62}\n")  # No limit in the older form.
  assert samplers.memory_limit(device, 1) == machine
  files[0].write_text(f"{2**28}\n")
  assert samplers.memory_limit(device, 2) == 2**27
  config, mesh = config_of(), mesh_lib.make_mesh()
  assert samplers.limit_of(config, mesh) == 2**28 // 8
  config.memory_gb = 3.0
  assert samplers.limit_of(config, mesh) == 3 * 10**9


def test_responses_need_a_stop_token_or_a_stop_string():
  class Silent(ByteTokenizer):
    stop_ids = ()

  silent = Silent()
  with pytest.raises(ValueError, match="config.rollout.stop_strings: found none, and the tokenizer names no token"):
    samplers.check_stops(silent, None)
  table = samplers.stop_table(("\n",), ByteTokenizer())
  samplers.check_stops(silent, table)
  samplers.check_stops(ByteTokenizer(), None)
  assert samplers.stop_table((), ByteTokenizer()) is None


@pytest.mark.parametrize(
  "changes",
  [{}, {"rollout.temperature": 0.5}, {"rollout.top_k": 2}, {"eval.batch_prompts": 16}, {"eval.samples": 2}, {"rollout.spare_prompts": 8}],
  ids=str,
)
def test_evaluations_share_the_program_of_rollouts_if_they_draw_alike(changes):
  config, model = tiny_config(overrides=changes), model_of("nano")
  params = jax.eval_shape(model.init, jax.random.key(0))
  made = samplers.make_samplers(config, model, ByteTokenizer(), params, records_routes=False)
  assert (made.sample is made.eval_sample) == (not changes)
