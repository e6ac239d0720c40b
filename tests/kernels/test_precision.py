"""Products of float32 arrays are products in float32 on accelerators, as lowered for TPUs."""

import ast
import pathlib
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxrl_llm
from jaxrl_llm import objectives
from jaxrl_llm.decoding.sampler import make_filter
from jaxrl_llm.kernels import precision
from jaxrl_llm.learner.needs import abstract_batch, needed_by_step
from jaxrl_llm.learner.train_step import init_state, make_train_step, policy_outputs
from jaxrl_llm.models import Experts, Lora, make_critic, make_model, preset
from tests.marks import few
from tests.programs import equations

PACKAGE = pathlib.Path(jaxrl_llm.__file__).parent
ROWS, ROW_TOKENS, PROMPT, GROUP = 2, 256, 8, 4

# Heads of width 64 take the kernels for TPUs in updates. The second layer is dense.
NANO = preset("nano", vocab_size=256)._replace(num_heads=4, num_kv_heads=2, head_dim=64, num_layers=2)
SPARSE = NANO._replace(experts=Experts(num_experts=4, top_k=2, d_ff=32, layers=(0,)))

PRODUCTS = {f"jnp.{name}" for name in ("dot", "einsum", "inner", "matmul", "outer", "tensordot", "vdot", "vecdot")}
PRODUCTS |= {f"jax.lax.{name}" for name in ("dot", "dot_general", "ragged_dot", "ragged_dot_general")}


@pytest.fixture(autouse=True)
def _for_tpus(monkeypatch):
  """Makes a model without a mesh choose what it chooses on TPUs."""
  monkeypatch.setattr(jax, "default_backend", lambda: "tpu")


def update(config):
  """Returns the update of a model and its abstract arguments."""
  model, optimizer = make_model(config), optax.sgd(1e-3)
  objective = objectives.make("gspo", kl_coef=0.1, entropy_coef=0.01)
  step = make_train_step(
    lambda params, batch: policy_outputs(model.logprobs, make_filter(), params, batch, router_losses=("balance",) * bool(config.experts)),
    objective,
    optimizer,
    learning_rate=lambda _: 1e-3,
    router_coefs={"balance": 1e-2} if config.experts else {},
  )
  state = jax.eval_shape(lambda key: init_state(model.init(key), optimizer), jax.random.key(0))
  one = jax.make_mesh((1,) * 5, ("data", "fsdp", "expert", "context", "tensor"), devices=jax.devices()[:1])
  batch = needed_by_step(abstract_batch(one, ROWS, ROW_TOKENS, shares=True), objective.needs, adaptive_kl=False)
  unplaced = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
  return step, (state, unplaced)


def decode(config):
  """Returns the prefill of prompts and one decoding step, and their abstract arguments."""
  model = make_model(config)

  def step(params, prompts, mask, tokens):
    cache, _ = model.prefill(params, prompts, mask, dtype=config.dtype)
    cache, one = model.grow(cache, len(tokens), 128, dtype=config.dtype), jnp.ones(len(tokens), jnp.int32)
    weights = model.decoding_weights(params)
    return model.decode(weights, tokens, PROMPT * one, cache, column=jnp.array(0), ages=jnp.arange(128), lengths=one, prompts_seen=mask)[0]

  ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
  params = jax.eval_shape(model.init, jax.random.key(0))
  return step, (params, ints(ROWS, PROMPT), jax.ShapeDtypeStruct((ROWS, PROMPT), bool), ints(ROWS * GROUP))


def values(config):
  """Returns the gradient of a critic, and its abstract arguments."""
  critic = make_critic(config)
  ints = jax.ShapeDtypeStruct((ROWS, ROW_TOKENS), jnp.int32)
  return jax.grad(lambda *args: jnp.sum(critic.values(*args) ** 2)), (jax.eval_shape(critic.init, jax.random.key(0)), ints, ints, ints)


def lowered_products(text):
  """Returns (operands' dtypes, whether both are HIGHEST, line) for each product of StableHLO."""
  lines = [line.strip() for line in text.splitlines() if "stablehlo.dot_general" in line or 'chlo.ragged_dot"' in line]
  dtypes = lambda line: [re.search(r"((bf|f|i|ui)\d+)>", x).group(1) for x in re.search(r" : \(([^)]*)\)", line).group(1).split(", ")[:2]]
  return [(dtypes(line), line.count("HIGHEST") == 2, line) for line in lines]


def kernel_products(jaxpr):
  """Returns the products in the kernels of a program."""
  kernels = [x.params["jaxpr"] for x in equations(jaxpr) if x.primitive.name == "pallas_call"]
  return [x for kernel in kernels for x in equations(kernel) if x.primitive.name == "dot_general"]


PROGRAMS = {
  "update": lambda config: update(config),
  "update, plain attention": lambda config: update(config._replace(attention="xla")),
  "update, attention in blocks": lambda config: update(config._replace(attention="chunked")),
  "update with adapters": lambda config: update(config._replace(lora=Lora(rank=4, alpha=8.0, targets=(".*",)))),
  "update, tied head": lambda config: update(config._replace(tie_embeddings=True)),
  "decode": decode,
  "decode, 8 bits": lambda config: decode(config._replace(decode_weights="int8")),
  "critic": lambda config: values(config),
}


@pytest.mark.parametrize("dtype", few(["float32", "bfloat16"], 1))
@pytest.mark.parametrize("name", few(PROGRAMS, 0, 6))
def test_every_product_of_float32_arrays_is_in_float32(name, dtype):
  """A bfloat16 model has such products too: those of its router and of a critic's head."""
  program, arguments = PROGRAMS[name](SPARSE._replace(dtype=dtype))
  traced = jax.jit(program).trace(*arguments)
  products = lowered_products(traced.lower(lowering_platforms=("tpu",)).as_text())
  assert any("ragged_dot" in line for *_, line in products)
  assert {dtypes == ["f32", "f32"] for dtypes, *_ in products} == ({True} if dtype == "float32" else {True, False})
  # A product of a bfloat16 array and a float32 gradient is one in bfloat16.
  assert not [line for dtypes, is_highest, line in products if is_highest != (dtypes == ["f32", "f32"])]
  if dtype == "float32":
    of_kernels = kernel_products(traced.jaxpr.jaxpr)
    assert of_kernels
    assert all(x.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2 for x in of_kernels)


@pytest.mark.parametrize("name", few(["update", "update, tied head"], 0))
def test_a_bfloat16_update_has_no_product_of_two_dtypes(name):
  """GPUs would widen its bfloat16 array, for a product in TensorFloat32 at half the speed."""
  program, arguments = PROGRAMS[name](NANO._replace(dtype="bfloat16"))
  text = jax.jit(program).trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()
  products = [(dtypes, line) for dtypes, _, line in lowered_products(text)]
  assert ["bf16", "bf16"] in [dtypes for dtypes, _ in products]
  assert not [line for dtypes, line in products if len(set(dtypes)) > 1]


def test_every_product_in_the_package_has_a_precision():
  """Calls and partial calls have one; a bare function or the operator `@` cannot."""
  silent = []
  for path in sorted(PACKAGE.rglob("*.py")):
    nodes = list(ast.walk(ast.parse(path.read_text())))
    calls = [x for x in nodes if isinstance(x, ast.Call) and "precision" in [keyword.arg for keyword in x.keywords]]
    precise = {part for call in calls for part in (call.func, *call.args)}
    for node in nodes:
      is_product = isinstance(node, ast.Attribute) and ast.unparse(node) in PRODUCTS
      is_operator = isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)
      if is_operator or is_product and node not in precise:
        silent.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
  assert not silent


def test_two_parts_have_16_bits():
  x = jax.random.normal(jax.random.key(0), (4096,)) * 2.0 ** jax.random.randint(jax.random.key(1), (4096,), -60, 60)
  high, low = jax.jit(lambda x: precision.in_parts(x, jnp.bfloat16))(x)
  assert high.dtype == low.dtype == jnp.bfloat16
  error = jnp.abs(x - (high.astype(jnp.float32) + low.astype(jnp.float32)))
  assert 2.0**-18 < float(jnp.max(error / jnp.abs(x))) <= 2.0**-17
