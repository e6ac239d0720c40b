"""Tests of loading: logits against those of transformers, placement, memory, and bad input."""

import functools
import weakref

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.devices.mesh import make_mesh, param_shardings
from jaxrl_llm.models import Lora, ModelConfig, make_model
from jaxrl_llm.models.files import loading, safetensors
from jaxrl_llm.models.files.loading import load, load_params, logits, open_source, read_config
from jaxrl_llm.models.files.tensor_names import entries, to_hf_layout, to_params_layout
from tests.marks import few
from tests.models.recorded import CHECKPOINTS, INDEX, NAMES, WEIGHTS, rewrite


def recorded(name):
  with np.load(CHECKPOINTS / name / "logits.npz") as arrays:
    return arrays["tokens"], arrays["logits"]


def test_every_family_is_recorded():
  assert NAMES == [
    "gemma3", "llama3", "mistral", "olmo2", "olmo3", "qwen2", "qwen2.5", "qwen2_window", "qwen3", "qwen3_moe", "qwen3_moe_mixed", "smollm2",
  ]  # fmt: skip


@pytest.mark.parametrize("name", few(NAMES, "gemma3", "olmo3", "qwen3_moe"))
def test_logits_are_those_of_transformers(name, loaded):
  tokens, expected = recorded(name)
  assert np.std(expected) > 0.5
  model, params = loaded(name)
  np.testing.assert_allclose(logits(model, params, tokens), expected, atol=2e-4, rtol=0)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)


def test_scaled_frequencies_change_the_logits(loaded):
  tokens, expected = recorded("llama3")
  model, params = loaded("llama3")
  plain = make_model(model.config._replace(rope_scaling=None))
  assert np.abs(logits(plain, params, tokens) - expected)[0, 16:].max() > 0.1


def test_the_table_works_both_ways(rng):
  for name in NAMES:
    for entry in entries(read_config(CHECKPOINTS / name)):
      tensor = rng.standard_normal(entry.shape)
      ours = to_params_layout(entry, tensor)
      np.testing.assert_array_equal(to_hf_layout([entry], [ours[0] if entry.over_experts else ours]), tensor)


def test_reading_the_config_reads_no_tensors(copy):
  folder = copy("qwen3")
  (folder / "model.safetensors").unlink()
  config = read_config(folder)
  assert isinstance(config, ModelConfig) and config.qk_norm and config.head_dim == 16


def test_weights_and_activations_have_the_requested_dtypes():
  model, params = load(CHECKPOINTS / "qwen3_moe", dtype="bfloat16", remat="full")
  assert (model.config.param_dtype, model.config.dtype, model.config.remat) == ("bfloat16", "bfloat16", "full")
  attention, mlp = params["sparse_layers"]["attention"], params["sparse_layers"]["mlp"]
  assert {x.dtype for x in (params["embedding"], attention["q"], mlp["gate"])} == {jnp.dtype("bfloat16")}
  assert {x.dtype for x in (params["final_norm"]["scale"], attention["q_norm"]["scale"], mlp["router"])} == {jnp.dtype("float32")}
  mixed, exact = load(CHECKPOINTS / "qwen3_moe", compute_dtype="bfloat16")
  assert (mixed.config.param_dtype, mixed.config.dtype) == ("float32", "bfloat16")
  chex.assert_trees_all_equal(jax.tree.map(lambda x, y: x.astype(y.dtype), exact, params), params)


def test_adapters_are_drawn_and_change_nothing_yet():
  tokens, expected = recorded("qwen3")
  config = read_config(CHECKPOINTS / "qwen3")._replace(lora=Lora(rank=2, alpha=4.0))
  model = make_model(config)
  params = load_params(CHECKPOINTS / "qwen3", model, key=jax.random.key(1))
  assert np.any(params["layers"]["attention"]["q_lora_a"])
  np.testing.assert_allclose(logits(model, params, tokens), expected, atol=2e-4, rtol=0)


def test_weights_of_another_model_are_refused():
  model = make_model(read_config(CHECKPOINTS / "qwen3")._replace(rope_theta=1e4))
  with pytest.raises(ValueError, match="qwen3: rope_theta: found 1000000.0 in the checkpoint, expected 10000.0"):
    load_params(CHECKPOINTS / "qwen3", model)


@pytest.mark.parametrize(("name", "sizes"), [("qwen3", dict(fsdp=4, tensor=2)), ("qwen3_moe_mixed", dict(fsdp=2, tensor=2, expert=2))])
def test_a_mesh_holds_the_same_weights_in_pieces(name, sizes, loaded):
  mesh = make_mesh(data=1, **sizes)
  model, params = load(CHECKPOINTS / name, mesh=mesh)
  chex.assert_trees_all_equal(params, loaded(name)[1])
  expected = param_shardings(mesh, model.logical_axes, params)
  assert jax.tree.all(jax.tree.map(lambda x, sharding: x.sharding.is_equivalent_to(sharding, x.ndim), params, expected))
  if name != "qwen3":
    gate = params["sparse_layers"]["mlp"]["gate"]
    assert gate.addressable_shards[0].data.shape == (1, 2, 16, 4) and gate.shape == (1, 4, 32, 8)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe_mixed"])
def test_a_device_gets_its_own_slice_of_a_tensor_only(name):
  """Devices that held whole tensors for a moment would give the same result."""
  mesh = make_mesh(data=1, fsdp=2, tensor=2, expert=2)
  config, source = open_source(CHECKPOINTS / name)
  model = make_model(config)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  shardings = param_shardings(mesh, model.logical_axes, shapes)
  leaf = lambda tree, entry: functools.reduce(lambda branch, name: branch[name], entry.path, tree)
  for entry in entries(config):
    sharding = leaf(shardings, entry)
    part = loading._place(source, entry, sharding).addressable_shards[0].data
    ours = part.transpose(0, *(axis + 1 for axis in entry.order)) if entry.over_experts else part.transpose(entry.order)
    held = sharding.shard_shape(leaf(shapes, entry).shape)
    assert ours.shape == held[0 if entry.layer is None else 1 :], entry


@pytest.mark.parametrize(
  ("name", "sizes", "words"),
  [
    ("qwen3", dict(tensor=4), "mesh.tensor=4 does not divide axis 'kv_heads' of layers/attention/k, which has size 2"),
    ("qwen3_moe", dict(expert=8), "mesh.expert=8 does not divide"),
  ],
)
def test_a_mesh_that_does_not_divide_is_refused_before_anything_is_read(name, sizes, words, monkeypatch):
  monkeypatch.setattr(safetensors, "read_tensor", None)
  with pytest.raises(ValueError) as error:
    load(CHECKPOINTS / name, mesh=make_mesh(**sizes))
  assert str(error.value).startswith(str(CHECKPOINTS / name) + ": ") and words in str(error.value)


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3_moe_mixed"])
def test_the_host_holds_one_tensor_at_a_time(name, monkeypatch):
  """Of experts, the host holds one kind of one layer."""
  live, peak = {}, 0

  def counted(stored, read=safetensors.read_tensor):
    nonlocal peak
    tensor = read(stored)
    live[id(tensor)] = tensor.nbytes
    weakref.finalize(tensor, live.pop, id(tensor))
    peak = max(peak, sum(live.values()))
    return tensor

  monkeypatch.setattr(safetensors, "read_tensor", counted)
  config, source = open_source(CHECKPOINTS / name)
  load(CHECKPOINTS / name)
  largest = max(len(entry.names) * 4 * int(np.prod(entry.shape)) for entry in entries(config))
  total = sum(4 * int(np.prod(shape)) for shape in source.shapes.values())
  assert 0 < peak <= largest < total / 4 and not live


def test_harmless_tensors_are_ignored(copy, loaded):
  folder = copy("smollm2")

  def add(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]  # Tied, and stored twice.
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

  rewrite(folder / "model.safetensors", add)
  chex.assert_trees_all_equal(load(folder)[1], loaded("smollm2")[1])


def test_both_layouts_of_experts_give_the_same_weights(copy, loaded):
  folder = copy("qwen3_moe")
  names = [f"model.layers.{layer}.mlp.experts." for layer in range(2)]

  def fuse(tensors):
    for name in names:
      gate, up, down = (np.stack([tensors.pop(f"{name}{e}.{part}_proj.weight") for e in range(4)]) for part in ("gate", "up", "down"))
      tensors[f"{name}gate_up_proj"], tensors[f"{name}down_proj"] = np.concatenate([gate, up], axis=1), down

  rewrite(folder / "model.safetensors", fuse)
  chex.assert_trees_all_equal(load(folder)[1], loaded("qwen3_moe")[1])


def cut(path, num_bytes):
  path.write_bytes(path.read_bytes()[:num_bytes])


def drop(name):
  return lambda tensors: tensors.pop(name)


def put(name, shape, dtype=np.float32):
  return lambda tensors: tensors.update({name: np.zeros(shape, dtype)})


SHARD = "model-00002-of-00003.safetensors"
UP = "model.layers.1.mlp.up_proj.weight"
# A checkpoint, the damage to its folder, and the words of the message.
DAMAGES = {
  "no config": ("qwen3", lambda f: (f / "config.json").unlink(), ["config.json: found no such file; expected a folder that transformers"]),
  "config is no JSON": ("qwen3", lambda f: cut(f / "config.json", 40), ["config.json: found a file that is not JSON"]),
  "a gguf alone": (
    "qwen3",
    lambda f: (f / "config.json").rename(f / "model.gguf"),
    ["found no config.json but model.gguf; give the path of the .gguf file itself"],
  ),
  "no weights": ("qwen3", lambda f: (f / WEIGHTS).unlink(), ["found no weights, expected model.safetensors or model.safetensors.index"]),
  "a pickle": (
    "qwen3",
    lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin"),
    ["found pytorch_model.bin, a pickle", "never opened; expected model.safetensors: convert it with transformers"],
  ),
  "a pickle by another name": ("qwen3", lambda f: (f / WEIGHTS).write_bytes(b"PK\x03\x04" + bytes(99)), ["found a pickle of PyTorch"]),
  "an adapter": ("qwen3", lambda f: (f / WEIGHTS).rename(f / "adapter_model.safetensors"), ["only adapter_model.safetensors", "merge"]),
  "a pointer": (
    "qwen3",
    lambda f: (f / WEIGHTS).write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
    [f"{WEIGHTS}: found a pointer of Git LFS", "git lfs pull"],
  ),
  "foreign": ("qwen3", lambda f: (f / WEIGHTS).write_bytes(b"\xff" * 99), [f"{WEIGHTS}: found 99 bytes that are not safetensors"]),
  "empty": ("qwen3", lambda f: cut(f / WEIGHTS, 0), [f"{WEIGHTS}: found 0 bytes that are not safetensors"]),
  "cut in the header": ("qwen3", lambda f: cut(f / WEIGHTS, 100), [f"{WEIGHTS}: found 100 bytes, expected a header of", "cut off"]),
  "cut in the tensors": ("qwen3", lambda f: cut(f / WEIGHTS, 50_000), [f"{WEIGHTS}: found 50000 bytes, expected ", "cut off"]),
  "a broken header": (
    "qwen3",
    lambda f: (f / WEIGHTS).write_bytes((8).to_bytes(8, "little") + b'{"a": 1}'),
    [f"{WEIGHTS}: found a header that is not safetensors'", "expected JSON with dtype, shape and data_offsets"],
  ),
  "a missing shard": ("qwen2.5", lambda f: (f / SHARD).unlink(), [f"{SHARD} is missing, 1 of the 3 files that"]),
  "a tensor missing in its shard": (
    "qwen2.5",
    lambda f: rewrite(f / SHARD, lambda tensors: tensors.pop(sorted(tensors)[0])),
    [f"{SHARD}: model.layers.", " is missing, though ", "says it is in this file"],
  ),
  "an index that leaves the folder": (
    "qwen2.5",
    lambda f: (f / INDEX).write_text((f / INDEX).read_text().replace(SHARD, f"../{SHARD}")),
    [f"found the file '../{SHARD}', expected the name of a file in the same folder"],
  ),
  "an index without a map": ("qwen2.5", lambda f: (f / INDEX).write_text("{}"), ["weight_map: found NoneType, expected an object"]),
  "a missing tensor": ("qwen3", lambda f: rewrite(f / WEIGHTS, drop(UP)), [f"qwen3: {UP} missing, expected for its 2 layers"]),
  "a tensor by another name": (
    "qwen3",
    lambda f: rewrite(f / WEIGHTS, lambda tensors: tensors.update({UP.replace("up_proj", "up.proj"): tensors.pop(UP)})),
    [f"{UP} missing", "it has model.layers.1.mlp.up.proj.weight"],
  ),
  "a tensor too many": (
    "qwen3",
    lambda f: rewrite(f / WEIGHTS, put("model.layers.2.mlp.up_proj.weight", (48, 32))),
    [f"found model.layers.2.mlp.up_proj.weight in {WEIGHTS}, expected no such tensor"],
  ),
  "another shape": (
    "qwen3",
    lambda f: rewrite(f / WEIGHTS, put(UP, (32, 48))),
    [f"{UP} in {WEIGHTS} has shape (32, 48), expected (48, 32) by the sizes in the config"],
  ),
  "a tensor of experts cut": (
    "qwen3_moe_mixed",
    lambda f: rewrite(f / WEIGHTS, put("model.layers.1.mlp.experts.gate_up_proj", (3, 16, 32))),
    ["model.layers.1.mlp.experts.3.gate_proj.weight and 1 others missing"],
  ),
  "quantized": (
    "qwen3",
    lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes().replace(b'"dtype":"F32"', b'"dtype":"I32"', 1)),
    [f"{WEIGHTS}: ", " is stored as I32, expected one of F32, BF16, F16"],
  ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_checkpoint_is_refused_in_one_line_before_memory_is_taken(case, copy, monkeypatch):
  name, damage, words = DAMAGES[case]
  folder = copy(name)
  damage(folder)
  monkeypatch.setattr(loading, "load_table", None)
  with pytest.raises(ValueError) as error:
    load(folder)
  message = str(error.value)
  assert message.startswith(str(folder)) and all(word in message for word in words) and "\n" not in message


def test_an_unknown_architecture_names_the_file(copy):
  folder = copy("qwen3", architectures=["Qwen3NextForCausalLM"])
  with pytest.raises(ValueError, match="config.json: unknown architecture 'Qwen3NextForCausalLM', expected one of Llama") as error:
    load(folder)
  assert str(error.value).startswith(str(folder / "config.json"))


@pytest.mark.parametrize(
  ("path", "arguments", "words"),
  [
    ("nowhere/at/all", {}, "nowhere/at/all"),
    (CHECKPOINTS / "qwen3" / "model.safetensors", {}, "found a file, expected a folder with config.json"),
    (CHECKPOINTS / "qwen3", dict(dtype="float16"), "dtype: found 'float16', expected one of float32, bfloat16"),
    (CHECKPOINTS / "qwen3", dict(compute_dtype="int8"), "compute_dtype: found 'int8', expected one of float32, bfloat16"),
  ],
)
def test_bad_arguments_are_refused(path, arguments, words):
  with pytest.raises(ValueError) as error:
    load(path, **arguments)
  assert words in str(error.value) and "\n" not in str(error.value)


def test_logits_of_packed_rows_count_positions_in_each_sequence(loaded):
  tokens, expected = recorded("llama3")
  model, params = loaded("llama3")
  row = np.concatenate([tokens[0, :20], tokens[0, :24], np.zeros(4, np.int32)])
  segments = np.repeat([1, 2, 0], [20, 24, 4])[None]
  packed = np.asarray(logits(model, params, row[None].tolist(), segments=segments))
  np.testing.assert_allclose(packed[0, :20], expected[0, :20], atol=2e-4)
  np.testing.assert_allclose(packed[0, 20:44], expected[0, :24], atol=2e-4)
  assert np.abs(packed[0, 20:44] - expected[0, 20:44]).max() > 0.01
  spread = np.asarray(logits(model, params, row[None], segments=segments, positions=2 * np.arange(48)[None]))
  # A mere shift would change nothing, because the rotation is relative.
  assert np.abs(spread - packed)[0, 20:44].max() > 0.01


def test_positions_count_from_0_in_each_sequence(loaded):
  """Logits cannot show it: rotation is relative, so a sequence may begin at 3 as well as at 0."""
  model, _ = loaded("qwen3")
  echo = model._replace(
    logits=lambda params, tokens, positions, segments: jnp.stack([positions, segments], axis=-1).astype(jnp.float32)
  )
  segments = [[1, 1, 1, 2, 2, 0, 0], [1, 2, 3, 3, 3, 3, 4]]
  echoed = logits(echo, {}, np.zeros((2, 7), np.int32), segments=segments)
  assert echoed[..., 0].tolist() == [[0, 1, 2, 0, 1, 0, 1], [0, 0, 0, 1, 2, 3, 0]]
  assert echoed[..., 1].tolist() == segments
  assert logits(echo, {}, [[5, 6]])[0].tolist() == [[0, 1], [1, 1]]


def test_logits_compile_once_per_model_and_shape(loaded):
  tokens, _ = recorded("qwen3")
  model, params = loaded("qwen3")
  once = model._replace(logits=chex.assert_max_traces(model.logits, n=1))
  chex.clear_trace_counter()
  logits(once, params, tokens)
  logits(once, params, tokens[:, ::-1])


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    (dict(tokens=[[1, 2], [3]]), "tokens: found rows of different lengths"),
    (dict(tokens=[1, 2]), "tokens: found shape (2,), expected rows of tokens, [B T]"),
    (dict(tokens=[[1, 96]]), "tokens: found int64 from 1 to 96, expected ids from 0 to 95"),
    (dict(tokens=[[-1, 5]]), "tokens: found int64 from -1 to 5, expected ids from 0 to 95"),
    (dict(tokens=[[0.5]]), "tokens: found float64"),
    (dict(tokens=[[1, 2]], segments=[[1]]), "segments: found shape (1, 1), expected the shape of the tokens, (1, 2)"),
  ],
)
def test_bad_tokens_are_refused(arguments, words):
  model = make_model(read_config(CHECKPOINTS / "qwen3"))
  with pytest.raises(ValueError) as error:
    logits(model, {}, **arguments)
  assert words in str(error.value)
