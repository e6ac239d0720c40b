"""An evaluation, from a checked request to its files: weights, samples, grades, results."""

import json
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from ml_collections import ConfigDict

from jaxrl_llm.config.command_line import UsageError
from jaxrl_llm.config.fields import flatten
from jaxrl_llm.devices import compilation_cache, hosts, xla_flags
from jaxrl_llm.evaluation import MetricName, answer_reader, held_out, parse_metric, table, to_json, write_samples
from jaxrl_llm.evaluation.held_out import Evaluated
from jaxrl_llm.rewards import WeightedReward
from jaxrl_llm.rewards.from_config import make_rewards
from jaxrl_llm.rewards.outcome import NoRewardError
from jaxrl_llm.run.jobs.evaluate.request import EvaluationRequest
from jaxrl_llm.run.jobs.evaluate.restored import restore
from jaxrl_llm.run.setup.data import load_task
from jaxrl_llm.run.setup.experiment import build_experiment, make_grader
from jaxrl_llm.run.setup.out_of_memory import explained
from jaxrl_llm.run.setup.saved_state import EVAL, TEST_SET
from jaxrl_llm.tasks.image_prompts import prompt_text
from jaxrl_llm.workdir import summary as summary_lib

SCHEMA = 1
"""Version of `eval.json`, raised when the meaning of a field changes."""


def run(request: EvaluationRequest, *, command: str) -> dict[str, Any]:
  """Evaluates, prints a table, writes the files, and returns the contents of `eval.json`.

  Args:
    request: Request from `request.parse`.
    command: Command as the user typed it.

  Raises:
    UsageError: If the request is wrong in a way that only devices, problems or weights can show.
    NoRewardError: If the verifier failed on all responses.
    OutOfMemoryError: If a device runs out of memory.
  """
  # Nothing is trained: training problems and demonstrations may be missing, and only the verifier
  # is called.
  config = request.config.copy_and_resolve_references()
  config.update_from_flattened_dict({"num_steps": 0, "warm_start.num_steps": 0, "reward.model_path": None})
  try:
    for path in (request.samples, request.out):
      path.parent.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise UsageError(f"{path.parent}: {error.strerror or error}; expected a folder that can be written (--samples, --out)") from error
  if request.regrade is not None:
    return _regrade(request, config, command)
  compilation_cache.cache_compilations()
  try:
    xla_flags.set_flags(exact=config.numerics.exact)
    hosts.join_processes()
    hosts.agree(flatten(config))
  except ValueError as error:
    raise UsageError(str(error)) from error
  with hosts.together({UsageError: 2, KeyboardInterrupt: 130}), explained(config, lambda: "eval"):
    return _sample(request, config, command)


def _sample(request: EvaluationRequest, config: ConfigDict, command: str) -> dict[str, Any]:
  begun, note = time.perf_counter(), print if hosts.is_main() else lambda line: None
  try:
    experiment = build_experiment(config)
    config = experiment.config
    verifier, task = experiment.verifier, experiment.task
    metrics = _metrics(request, verifier, config.eval.samples)
    params, rl_steps = restore(experiment, request.source)
  except (ImportError, ValueError) as error:
    raise UsageError(" ".join(str(error).splitlines())) from error
  order = held_out.choose(len(task.test), config.eval.num_prompts, seed=TEST_SET)
  where, name = _where(request), config.task.test_name or config.task.name
  note(f"{where}, RL step {rl_steps}" if request.source.kind == "run" else where)
  note(
    f"{name}: {len(order):,} of {len(task.test):,} test problems, {config.eval.samples} samples each of at most "
    f"{config.rollout.max_new_tokens:,} tokens, temperature {config.eval.temperature:g}"
  )
  ready = time.perf_counter()
  with make_grader(config, [verifier]) as grader, experiment.drawing.queue:
    evaluated = held_out.evaluate_policy(
      experiment.drawing.samples(params, rl_steps),
      [task.test[i] for i in order],
      # As in the run: an evaluation with the same settings draws the same samples.
      jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), EVAL), rl_steps),
      batch_prompts=config.eval.batch_prompts,
      verifier=verifier,
      call=grader,
      note=note,
    )
  facts = {
    "checkpoint": {"path": where.partition(", ")[0], "step": request.source.step, "rl_step": rl_steps},
    "task": {"name": name, "test_problems": len(task.test)},
    "seconds": {"start": ready - begun, "sample_and_grade": time.perf_counter() - ready},
    "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
  }
  if hosts.is_main():
    decode = partial(prompt_text, tokenizer=task.tokenizer)
    names = dict(verifier=verifier.name, decode=decode, seed=config.seed, model=where, step=rl_steps)
    write_samples(request.samples, held_out.sample_rows(evaluated, **names))
  return _report(request, evaluated, metrics, verifier, facts, command)


def _regrade(request: EvaluationRequest, config: ConfigDict, command: str) -> dict[str, Any]:
  begun, rows = time.perf_counter(), request.regrade
  try:
    verifier = make_rewards(load_task(config), config)[0]
    metrics = _metrics(request, verifier, config.eval.samples)
  except (ImportError, ValueError) as error:
    raise UsageError(" ".join(str(error).splitlines())) from error
  try:
    with make_grader(config, [verifier]) as grader:
      evaluated = held_out.regrade(rows, verifier=verifier, call=grader)
  except NoRewardError:
    raise
  except ValueError as error:
    raise UsageError(f"--regrade={request.regraded}: {' '.join(str(error).splitlines())}") from error
  after = held_out.regraded_rows(rows, evaluated, verifier=verifier.name)
  changed = sum(old.score != new.score for old, new in zip(rows, after, strict=True))
  print(f"{request.regraded}: {len(rows):,} samples graded again with {verifier.name}, {changed:,} rewards changed")
  write_samples(request.samples, after)
  facts = {
    "checkpoint": {"path": rows[0].model, "step": None, "rl_step": rows[0].step},
    "task": {"name": config.task.test_name or config.task.name},
    "regraded": {"file": str(request.regraded), "changed": changed},
    "seconds": {"grade": time.perf_counter() - begun},
  }
  return _report(request, evaluated, metrics, verifier, facts, command)


def _report(
  request: EvaluationRequest,
  evaluated: Evaluated,
  metrics: Sequence[MetricName],
  verifier: WeightedReward,
  facts: dict[str, Any],
  command: str,
) -> dict[str, Any]:
  summary = held_out.summary(evaluated, metrics)
  result = {"schema": SCHEMA, "command": command} | facts | to_json(summary)
  failure = evaluated.graded.detail or None
  result |= {"verifier": verifier.name, "first_failure": failure, "samples_file": str(request.samples)}
  result["config"] = json.loads(json.dumps(request.config.to_dict()))
  # Regrading starts no device and must not query one.
  if request.regrade is None and not hosts.is_main():
    return result
  summary_lib.write_json(request.out, result)
  print(table(summary))
  if failure is not None:
    print(f"first failure: {failure}")
  print(f"results: {request.out}\nsamples: {request.samples}")
  return result


def _metrics(request: EvaluationRequest, verifier: WeightedReward, num_samples: int) -> tuple[MetricName, ...]:
  """Returns the requested metrics, or by default those that a run logs and a majority.

  The majority needs several samples and a verifier that reads answers.
  """
  if request.metrics is not None:
    held_out.check_metrics(request.metrics, verifier, setting="--metrics")
    return request.metrics
  metrics = [MetricName("avg@n", num_samples)]
  if num_samples > 1:
    metrics.append(MetricName("pass@k", num_samples, num_samples))
    metrics += [MetricName("maj@n", num_samples)] if answer_reader(verifier) is not None else []
  return tuple(dict.fromkeys([*metrics, *map(parse_metric, request.config.eval.metrics)]))


def _where(request: EvaluationRequest) -> str:
  """Describes the weights in words."""
  if request.source.kind == "run":
    return f"{request.source.path}@{request.source.step}"
  model = request.config.model
  return model.path if model.path is not None else f"random weights of the preset {model.preset!r}, seed {request.config.seed}"
