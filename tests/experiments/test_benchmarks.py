"""Benchmarks of the sampler: refusals, counts, reports, and the dialogue with the engines.

No wall-clock time is judged.
"""

import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmarks import host_growth, peers, random_checkpoint, roofline, sampler, service
from experiments.benchmarks.engines import worker
from experiments.benchmarks.engines.job import Job, token_ids
from jaxrl_llm.models import Experts, ModelConfig, make_model, preset, read_config

NANO = preset("nano", vocab_size=264)._replace(tie_embeddings=False, max_positions=32)
# Weights of a layer: 4·2·(2·2 + 2·1) = 48 of attention, 3·4·5 = 60 of the feed-forward layer.
# Weights of the head: 4·7 = 28.
TINY = ModelConfig(vocab_size=7, num_layers=2, d_model=4, num_heads=2, num_kv_heads=1, head_dim=2, d_ff=5)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
  """A folder with weights and prompts.npz, and no tokenizer."""
  folder = tmp_path_factory.mktemp("checkpoints") / "nano"
  random_checkpoint.write(folder, NANO, num_prompts=2, prompt_tokens=6)
  return folder


def flags(folder, **changes):
  settings = dict(checkpoint=folder, prompts=folder / "prompts.npz", group_size=2, max_new_tokens=4, repeats=2) | changes
  return [f"--{name}={value}" for name, value in settings.items()]


@pytest.mark.parametrize("main", [sampler.main, peers.main])
@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(checkpoint="nowhere/at-all/there"), r"--checkpoint: found '.*there', which does not exist"),
    (dict(prompts="nowhere.npz"), r"--prompts: found no file .*nowhere.npz"),
    (dict(temperature=-0.5), r"--temperature: found -0.5, expected 0 or more"),
    (dict(temperature="nan"), r"--temperature: found nan"),
    (dict(top_p=0), r"--top_p: found 0.0"),
    (dict(top_p=1.5), r"--top_p: found 1.5, expected a number above 0 and at most 1"),
    (dict(group_size=0), r"--group_size: found 0"),
    (dict(max_new_tokens=27), r"longest prompt has 6 tokens, which with --max_new_tokens=27 exceeds the 32 positions"),
  ],
)
def test_bad_flags_get_one_line(checkpoint, capsys, main, changes, message):
  assert main(flags(checkpoint, **changes)) == 2
  refused(capsys, message)


def refused(capsys, message):
  error = capsys.readouterr().err
  assert error.count("\n") == 1, error
  assert re.search(message, error), error


@pytest.mark.parametrize(
  ("arrays", "message"),
  [
    (dict(tokens=np.ones((2, 3), np.int32)), r"found tokens in .*, expected `prompts`, int32 \[N P\]"),
    (dict(prompts=np.ones((2, 3))), r"`prompts` is float64 of shape \[2, 3\]"),
    (dict(prompts=np.ones(3, np.int32)), r"`prompts` is int32 of shape \[3\]"),
    (dict(prompts=np.full((2, 3), 264)), r"token ids from 264 to 264, expected 0 to 263"),
    (dict(prompts=np.full((2, 3), -1)), r"token ids from -1 to -1"),
    (
      dict(prompts=np.ones((2, 3), np.int32), lengths=np.array([3])),
      r"`lengths` has 1 entries, expected one for each of the 2 prompts",
    ),
    (dict(prompts=np.ones((2, 3), np.int32), lengths=np.array([3, 4])), r"`lengths` from 3 to 4, expected 1 to 3"),
    (dict(prompts=np.ones((2, 3), np.int32), lengths=np.array([0, 3])), r"`lengths` from 0 to 3"),
  ],
)
def test_bad_prompts_get_one_line(checkpoint, tmp_path, capsys, arrays, message):
  np.savez(tmp_path / "p.npz", **arrays)
  assert sampler.main(flags(checkpoint, prompts=tmp_path / "p.npz")) == 2
  refused(capsys, message)


def test_prompts_in_another_format_get_one_line(checkpoint, tmp_path, capsys):
  (tmp_path / "p.npz").write_text("hello")
  assert sampler.main(flags(checkpoint, prompts=tmp_path / "p.npz")) == 2
  refused(capsys, "is not an .npz file")


def test_the_error_about_a_missing_stop_token_names_the_flag(checkpoint, tmp_path, capsys):
  for name in ("config.json", "model.safetensors"):
    (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
  raw = json.loads((tmp_path / "config.json").read_text())
  (tmp_path / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if key != "eos_token_id"}))
  assert sampler.main(flags(tmp_path, prompts=checkpoint / "prompts.npz")) == 2
  refused(capsys, "names no stop token .* pass --ignore_eos")


@pytest.mark.parametrize(
  ("generation", "config", "expected"),
  [
    ({"eos_token_id": [5, 6]}, {"eos_token_id": 7, "pad_token_id": 9}, ((5, 6), 9)),
    (None, {"eos_token_id": 7}, ((7,), 0)),
    ({}, {"eos_token_id": [0, 1], "pad_token_id": 1}, ((0, 1), 2)),
    ({"eos_token_id": None}, {}, ((), 0)),
  ],
)
def test_stop_ids(tmp_path, generation, config, expected):
  (tmp_path / "config.json").write_text(json.dumps(config))
  if generation is not None:
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
  assert token_ids(tmp_path) == expected


def test_roofline_of_a_prefill_by_hand():
  assert roofline.layer_weights(TINY) == (2 * (4 * 2 * 6 + 60), 0, 28)
  work = roofline.prefill(TINY, [3, 1], itemsize=4)
  # 4 tokens through 216 weights; 6 + 1 pairs of query and key with 4·H·C = 16 operations each in 2
  # layers; 2 rows of logits.
  assert work.flops.tolist() == [2 * 4 * 216 + 2 * 16 * 7 + 2 * 2 * 28]
  # All weights; keys and values of 4 tokens with 2·K·C = 4 numbers in 2 layers; logits written and
  # read.
  assert work.num_bytes.tolist() == [4 * (216 + 28) + 4 * 2 * 4 * 4 + 2 * 4 * 2 * 7]


def test_roofline_of_decoding_by_hand():
  # Two prompts of 3 and 1 tokens with two responses each. The prefill draws the first tokens.
  work = roofline.decode(TINY, [3, 1], [3, 2, 1, 2], itemsize=4)
  rows, pairs = np.array([3, 1]), np.array([3 + 3 + 1 + 3 * 1, 3 + 2])
  np.testing.assert_array_equal(work.flops, 2 * rows * (216 + 28) + 2 * 16 * pairs)
  cached = np.array([3 + 1 + 3 * 1, 3 + 2])  # The first two responses read their prompt once.
  np.testing.assert_array_equal(work.num_bytes, 4 * (216 + 28) + 4 * 2 * 4 * cached + 2 * 4 * rows * 7)
  # With two slots the last response waits for the second one to end.
  slots = roofline.decode(TINY, [3, 1], [3, 2, 1, 2], slots=2, itemsize=4)
  np.testing.assert_array_equal(slots.flops.sum(), work.flops.sum())
  np.testing.assert_array_equal(slots.flops, 2 * 2 * (216 + 28) + 2 * 16 * np.array([4 + 4, 5 + 2]))


def test_roofline_of_experts():
  sparse = TINY._replace(experts=Experts(num_experts=4, top_k=1, d_ff=3))
  assert roofline.layer_weights(sparse) == (2 * (48 + 4 * 4), 2 * 36, 28)
  one, many = (roofline.prefill(sparse, [length], itemsize=1) for length in (1, 1000))
  assert one.flops.item() == 2 * (128 + 72) + 2 * 16 + 2 * 28
  # One token reads the expert that it visits, and many tokens read all experts.
  assert one.num_bytes.item() == 128 + 72 + 28 + 2 * 4 + 2 * 4 * 7
  assert many.num_bytes.item() == pytest.approx(128 + 4 * 72 + 28 + 2 * 4 * 1000 + 2 * 4 * 7)


@pytest.mark.parametrize(
  ("kind", "terabytes"),
  [
    ("NVIDIA H100 80GB HBM3", 3.35), ("NVIDIA H200", 4.8), ("NVIDIA A100-SXM4-80GB", 2.04), ("TPU v5 lite", 0.819), ("TPU v5", 2.765),
    ("TPU v5p", 2.765), ("TPU v6 lite", 1.64),
  ],
)  # fmt: skip
def test_published_peaks(kind, terabytes):
  assert roofline.datasheet(kind).bytes_per_s == terabytes * 1e12


def test_unknown_machines_are_measured(monkeypatch):
  monkeypatch.setattr(roofline, "MATMULS", ((64, 64, 64),))
  machine = roofline.find_machine(jax.devices()[0], 1000)
  assert machine.flops_per_s > 1e6 and machine.bytes_per_s > 1e7
  assert machine.source.startswith("measured")


@pytest.mark.slow
def test_a_run_reports_everything(checkpoint, tmp_path, capsys, monkeypatch):
  machine = roofline.Machine("toy", 1e9, 1e9, "made up")
  monkeypatch.setattr(roofline, "find_machine", lambda device, num_bytes: machine)
  assert sampler.main([*flags(checkpoint), "--ignore_eos", "--json", str(tmp_path / "out" / "result.json")]) == 0
  result = json.loads((tmp_path / "out" / "result.json").read_text())
  assert set(result) == {
    "job", "device", "model", "tokens_per_s", "seconds", "generated_tokens", "response_length", "stopped_fraction", "mean_logprob",
    "time_to_first_token_s", "load_s", "compile_s", "memory", "roofline",
  }  # fmt: skip
  assert result["generated_tokens"] == [2 * 2 * 4] * 2
  assert result["stopped_fraction"] == 0
  assert set(result["tokens_per_s"]) == {"median", "min", "max"}
  assert set(result["memory"]) == {"source", "peak_bytes", "loaded_bytes", "increase_bytes", "program_temp_bytes"}
  expected = roofline.bound(roofline.rollout(NANO, [6, 6], [4] * 4, itemsize=4), machine)
  assert result["roofline"]["of_median_run"] == expected._asdict()
  assert result["roofline"]["fraction"]["max"] == pytest.approx(expected.seconds / result["seconds"]["min"])
  assert -7 < result["mean_logprob"] < -4  # About ln 264 below zero.
  assert "tokens/s" in capsys.readouterr().out


@pytest.mark.slow
def test_the_engine_and_the_sampler_do_the_same_job(checkpoint, tmp_path, capsys):
  settings = dict(checkpoint=checkpoint, clients=2, requests=5, prompt_tokens=6, cap=7, median=4, repeats=1, json=tmp_path / "out.json")
  assert service.main([f"--{name}={value}" for name, value in settings.items()]) == 0
  result = json.loads((tmp_path / "out.json").read_text())
  assert result["ratio"] == {"engine": [result["tokens_per_s"]["engine"][0] / result["tokens_per_s"]["sampler"][0]]}
  assert "5 requests of 2 clients" in capsys.readouterr().out
  assert service.main([f"--checkpoint={checkpoint}", "--clients=0"]) == 2
  refused(capsys, "--clients: found 0, expected 1 or more")
  assert service.main([f"--checkpoint={checkpoint}", "--cap=30"]) == 2
  refused(capsys, "context: found 94, expected 2 or more, at most the model's 32 positions")


@pytest.mark.slow
def test_clients_over_http_do_the_same_job(checkpoint, capsys):
  settings = dict(checkpoint=checkpoint, clients=2, requests=5, prompt_tokens=6, cap=7, median=4, repeats=1)
  assert service.main(["--http", *(f"--{name}={value}" for name, value in settings.items())]) == 0
  assert re.search(r"ratio +\d+\.\d\d .*by the engine, \d+\.\d\d .*by the service", capsys.readouterr().out)


def test_responses_end_according_to_the_hazard():
  """The stop token has the requested probability at each length, whatever tokens came before."""
  hazard = random_checkpoint.lognormal_hazard(8, median=4, sigma=1.0)
  model = make_model(NANO)
  params, classes = random_checkpoint.with_lengths(jax.jit(model.init)(jax.random.key(0)), hazard, rng=np.random.default_rng(0))
  rng = np.random.default_rng(1)
  tokens = np.stack([[rng.choice(np.flatnonzero(classes == t)) for t in range(8)] for _ in range(4)])
  logits = jax.jit(model.logits)(params, jnp.asarray(tokens), jnp.tile(jnp.arange(8), (4, 1)), jnp.ones((4, 8), jnp.int32))
  probs = np.asarray(jax.nn.softmax(logits))
  np.testing.assert_allclose(probs[..., random_checkpoint.EOS_ID], np.tile(hazard, (4, 1)), rtol=0.1, atol=1e-4)
  for t in range(7):
    np.testing.assert_allclose(probs[:, t, classes == t + 1].sum(-1), 1 - hazard[t], atol=0.02)


FAKE = """
import sys
from experiments.benchmarks.engines.worker import Engine, Generated, serve

def load(job):
  print("noise on stdout")
  if job.temperature == 2:
    raise ValueError("no such\\ntemperature")
  def generate(seed):
    if seed == 1 and job.temperature == 3:
      print("out of luck", file=sys.stderr)
      sys.exit(3)
    return Generated([seed % 1000 + 1, 4], -0.5)
  return Engine(f"fake of {job.stop_ids}", generate)

serve(load)
"""


@pytest.fixture
def fake(tmp_path):
  """The command of an engine that does nothing."""
  (tmp_path / "fake.py").write_text(FAKE)
  return [sys.executable, str(tmp_path / "fake.py")]


def test_engines_take_turns(fake, capsys):
  job = Job("weights", "prompts", stop_ids=(3,))
  result = peers.compare({"ours": fake, "a": fake}, job, repeats=3, timeout=60)
  assert result["failed"] == {}
  ours = result["engines"]["ours"]
  assert ours["tokens"] == [5, 6, 7]
  assert ours["about"] == "fake of (3,)"
  assert ours["mean_logprob"] == -0.5
  assert ours["mean_length"] == 3.0
  assert ours["peak_bytes"] > 1e6
  assert 0 <= ours["cpu_seconds"]["median"] < 1
  assert result["ratio"]["peer"] == "a"
  assert "ours / a, run by run" in peers.describe(result)
  turns = [line.split()[1] for line in capsys.readouterr().err.splitlines() if "/3" in line]
  assert turns == ["ours:", "a:"] * 3


@pytest.mark.parametrize(
  ("temperature", "message"), [(2.0, "a: ValueError: no such temperature"), (3.0, "a: the worker ended with status 3: out of luck")]
)
def test_a_failing_engine_is_named(fake, temperature, message):
  result = peers.compare({"a": fake}, Job("", "", temperature=temperature), repeats=2, timeout=60)
  assert (result["engines"], result["failed"], result["ratio"]) == ({}, {"a": message}, None)


def test_a_missing_interpreter_names_the_flag():
  result = peers.compare({"tunix": ["no/such/python"]}, Job("", ""), repeats=1, timeout=60)
  assert result["failed"]["tunix"].endswith("pass --python.tunix=PYTHON")


def test_an_unknown_engine_is_refused(checkpoint, capsys):
  assert peers.main([*flags(checkpoint), "--engines=ours,vllm"]) == 2
  refused(capsys, "--engines: found 'vllm', expected some of ours, tunix, transformers")


def test_the_peak_includes_freed_memory():
  if not worker.reset_peak():
    pytest.skip("this system does not let a process reset its peak")
  before = worker.peak_bytes()
  np.ones(2**23)  # 64 MiB, freed at once.
  assert worker.peak_bytes() - before > 2**25


def test_the_experts_of_a_token_are_as_wide_as_a_dense_layer(tmp_path, capsys):
  sizes = ["--hidden=128", "--layers=1", "--vocab=64", "--prompts=1"]
  assert random_checkpoint.main([*sizes, "--experts=4", "--top_k=3", str(tmp_path / "sparse")]) == 0
  config = read_config(tmp_path / "sparse")
  assert config.experts == Experts(4, 3, 128, layers=config.experts.layers) and config.experts.layers in (None, (0,))
  capsys.readouterr()
  assert random_checkpoint.main([*sizes, "--experts=4", "--top_k=5", str(tmp_path / "other")]) == 2
  refused(capsys, "--top_k: found 5, expected a divisor of 384 up to --experts=4")
  assert random_checkpoint.main([*sizes, "--experts=4", "--lengths=lognormal", str(tmp_path / "other")]) == 2
  refused(capsys, "--lengths: found 'lognormal', expected 'none' with --experts")


def test_every_part_of_the_hosts_work_is_measured_at_every_size(tmp_path, capsys):
  """Memory is counted exactly, so that its growth can be judged."""
  sizes = ["--sizes=50,500", "--cap=16", "--median=6", "--prompt_tokens=8", "--row_tokens=64"]
  assert host_growth.main([*sizes, "--repeats=1", f"--json={tmp_path / 'x.json'}"]) == 0
  result, shown = json.loads((tmp_path / "x.json").read_text()), capsys.readouterr().out
  assert result["sizes"] == [48, 496]
  for name, part in result["parts"].items():
    assert len(part["cpu_seconds"]) == len(part["peak_bytes"]) == len(part["kept_bytes"]) == 2 and min(part["cpu_seconds"]) >= 0, name
    assert re.search(rf"^{name} +[0-9.]+ +[0-9.]+", shown, re.MULTILINE), name
    assert part["peak_exponent"] < 1.15, name
  pack = result["parts"]["pack"]
  assert pack["kept_bytes"][1] > 496 * 7 * 4 * 10, "eight arrays of rows with 4 bytes a token"
  assert pack["peak_exponent"] > 0.8


@pytest.mark.parametrize(
  ("flag", "message"),
  [
    ("--sizes=100", "--sizes: found .96. in whole groups of --group_size=8, expected two or more, ascending"),
    ("--sizes=200,100", "--sizes: found .200, 96."),
    ("--sizes=4,100", "--sizes: found .0, 96."),
    ("--row_tokens=100", "--row_tokens: found 100, expected at least 160"),
    ("--repeats=0", "--repeats: found 0, expected 1 or more"),
  ],
)
def test_sizes_that_show_no_growth_are_refused(capsys, flag, message):
  assert host_growth.main([flag]) == 2
  error = capsys.readouterr().err
  assert error.count("\n") == 1 and re.search(message, error), error
