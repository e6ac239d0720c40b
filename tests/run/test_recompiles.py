"""Compilations of a run: each declared shape once; anything that compiles again is named."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import train
from jaxrl_llm.devices.compilation import CompileCounter, ShapeError, compiled_for
from tests.runs import VARIED, column, quick, tiny_config

SHORT = VARIED | {"warm_start.num_steps": 0, "eval.every": 2, "eval.num_prompts": 8, "checkpoint.every": 100, "log.samples_every": 100}


def run_with(workdir, **overrides):
  """Runs a config and returns the lines that it printed and the run."""
  lines = []
  workdir.mkdir(parents=True, exist_ok=True)
  with quick():
    run = train.start_run(tiny_config(overrides=SHORT | overrides), workdir, log=lines.append)
    train.proceed(run)
  return lines, run


def shaped(*sizes):
  @jax.jit
  def doubled(scale, x):
    return scale * x

  return compiled_for(doubled, [(jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((size,), jnp.float32)) for size in sizes])


def test_an_undeclared_shape_is_named_with_the_declared_ones():
  program = shaped(2, 4)
  assert program(jnp.float32(2), jnp.ones(4)).tolist() == [2.0] * 4
  with pytest.raises(ShapeError, match=r"^doubled: found a batch of shape \(3,\), expected one of the declared shapes: \(2,\), \(4,\)$"):
    program(jnp.float32(2), jnp.ones(3))


def test_only_an_undeclared_compilation_in_a_warm_run_is_a_culprit():
  counter = CompileCounter("step", "eval")
  unruly = jax.jit(lambda x: x * 3)
  inputs = [jnp.ones(size) for size in (2, 3, 4)]
  program, scale = shaped(2, 3), jnp.float32(2)
  unruly(inputs[0])
  counter.passed("eval")
  unruly(inputs[1])
  counter.passed("step")
  before = counter.count
  program(scale, inputs[1])
  assert counter.culprits() == [] and counter.unexpected == 0 and counter.count == before + 2
  for x in inputs:
    unruly(x)
  assert counter.culprits() == ["jit(<lambda>) for float32[4]"] and counter.culprits() == [] and counter.unexpected == 1


def test_the_counter_prints_nothing_and_logs_nothing(capfd):
  seen, handler = [], logging.Handler()
  handler.emit = seen.append
  logging.getLogger().addHandler(handler)
  try:
    counter = CompileCounter("step")
    counter.passed("step")
    jax.jit(lambda x: x * 5)(jnp.ones(7))
  finally:
    logging.getLogger().removeHandler(handler)
  assert counter.unexpected and not seen and capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_function_that_recompiles_in_a_run_is_named(tmp_path, monkeypatch):
  adapt_coefficients = train.adapt_coefficients

  @jax.jit
  def statistics_of_the_step(x):
    return x.sum()

  def unruly(run, row):
    statistics_of_the_step(np.zeros(run.phases.step, np.float32))
    return adapt_coefficients(run, row)

  monkeypatch.setattr(train, "adapt_coefficients", unruly)
  lines, run = run_with(tmp_path, num_steps=4)
  assert column(tmp_path, "perf/recompiles") == [0, 1, 2, 3] and run.compiled.unexpected == 3
  told = [line for line in lines if line.startswith("compiled again")]
  for step, line in zip((2, 3, 4), told, strict=True):
    assert f"RL step {step}: jit(statistics_of_the_step) for float32[{step}]" in line


@pytest.mark.slow
def test_fifty_steps_of_mixed_lengths_compile_nothing_after_the_first(tmp_path):
  """Prompts and rows have several buckets; all their programs compile in the first step."""
  overrides = {"num_steps": 50, "eval.every": 10, "rollout.prompt_buckets": (6, 8), "learner.row_buckets": (4, 6, 8)}
  lines, run = run_with(tmp_path, **overrides)
  compiles = column(tmp_path, "perf/compiles")
  assert set(column(tmp_path, "perf/recompiles")) == {0} and not [line for line in lines if line.startswith("compiled again")]
  assert set(compiles[1:]) == {compiles[1]} == {run.compiled.count} and len(set(column(tmp_path, "perf/packing_waste"))) > 10
  assert len(run.experiment.learner.rl_step.programs) == 3 and len(run.experiment.drawing.programs.sample.programs) == 2
