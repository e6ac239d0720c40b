"""The terms of a run's reward, built from its config."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from ml_collections import ConfigDict

from jaxrl_llm import rewards
from jaxrl_llm.messages import Problem, problem_of
from jaxrl_llm.rewards import REWARDS, RewardSpec, WeightedReward, model, weighted
from jaxrl_llm.rewards.rubric import judge_terms, path_of, read_rubric, rubric_problems
from jaxrl_llm.rewards.terms import parse_settings, parse_terms
from jaxrl_llm.tasks import Task
from jaxrl_llm.tasks.mixture import route
from jaxrl_llm.tasks.sets.environment import REWARD, environment_reward, turn_steps


def make_rewards(task: Task, config: ConfigDict) -> list[WeightedReward]:
  """Makes the terms of a run's reward, with the task's verifier first.

  The config may add a reward model, an environment, further terms and penalties.

  Raises:
    ValueError: If a reward cannot be built here. One line, with the fix.
  """
  section, settings = config.reward, parse_settings(config.reward.settings)
  terms = [_term(task, name, config, settings.get(name, {})) for name in task.rewards]
  if task.routed:
    terms = [WeightedReward("verifier", partial(route, {term.name: term.fn for term in terms}), routes=tuple(terms))]
  terms = [term._replace(weight=section.verifier_weight) for term in terms]
  if REWARD in task.rewards:  # The verifier is the environment itself, whose reward counts once.
    terms = [term._replace(weight=term.weight * config.environment.weight, steps=turn_steps) for term in terms]
  elif task.step_rewards is not None and config.environment.name is None:
    steps = task.step_rewards
    terms[0] = terms[0]._replace(steps=lambda completion, example: steps(example, completion.token_ids))
  if section.model_path is not None:
    # Still logged, and used by evaluations.
    terms = [term._replace(weight=0.0) if section.model_only else term for term in terms]
    budget = max(config.rollout.prompt_buckets) + config.rollout.max_new_tokens
    options = dict(tokenizer=task.tokenizer, max_tokens=budget, dtype=config.model.dtype, chat=config.task.get("chat"))
    terms.append(model.reward_model_term(section.model_path, weight=section.model_weight, **options))
  if config.environment.name is not None and config.environment.weight and REWARD not in task.rewards:
    terms.append(WeightedReward(REWARD, environment_reward, config.environment.weight, steps=turn_steps))
  for name, weight in parse_terms(section.terms).items():
    if (path := path_of(name)) is not None:
      judged = judge_terms(path, weight=weight)
      if judged[0].name in [term.name for term in terms]:
        name = judged[0].name
        raise ValueError(f"config.reward.terms: found {name!r} twice, expected another name in one of the rubrics (its field name)")
      terms += judged
      continue
    if name in [term.name for term in terms]:
      raise ValueError(f"config.reward.terms: found {name!r}, which is a reward of task {task.name} already, expected another")
    term = _term(task, name, config, settings.get(name, {}))
    terms.append(term._replace(weight=weight, monitors=weight == 0))
  if section.form_weight:
    if task.form_reward is None:
      raise ValueError(f"config.reward.form_weight={section.form_weight}: task {task.name} has no reward for the form, expected 0")
    terms.append(weighted(task.form_reward, RewardSpec(task.form_reward), section.form_weight, shapes=True))
  if section.overlong_buffer:
    penalty = rewards.soft_overlong(config.rollout.max_new_tokens, section.overlong_buffer)
    terms.append(WeightedReward("soft_overlong", penalty, shapes=True))
  if unread := [name for name in settings if name not in [term.name for term in terms]]:
    names = ", ".join(term.name for term in terms)
    raise ValueError(f"config.reward.settings: found settings of {unread[0]!r}, which is not a reward of this run; it has {names}")
  return terms


def _term(task: Task, name: str, config: ConfigDict, settings: Mapping[str, Any]) -> WeightedReward:
  """Makes a term by name: the task's own function, or a registered one set up by the config."""
  if (path := path_of(name)) is not None:
    return judge_terms(path)[0]
  if name in task.verifiers:
    return WeightedReward(name, task.verifiers[name])
  section = _section(name)
  if section is None:
    return weighted(name, spec_of(name, settings))
  try:
    return weighted(name, spec_of(name, {key: x for key, x in config[section].items() if x is not None} | dict(settings)))
  except ValueError as error:
    raise ValueError(f"config.{section}: reward {name!r} of task {task.name}: {error}") from error


def _section(name: str) -> str | None:
  """Returns the config section with a reward's settings, or None if it has no section."""
  return REWARDS[name].section if name in REWARDS else None


def spec_of(name: str, settings: Mapping[str, Any]) -> RewardSpec:
  """Returns the spec of a reward.

  Args:
    name: Key of `REWARDS`, or import path MODULE:FUNCTION of a user's function or factory.
    settings: Settings of the reward.
  """
  if ":" in name:
    return RewardSpec("imported", {"path": name} | ({"settings": dict(settings)} if settings else {}))
  return RewardSpec(name, dict(settings))


def reward_problems(config: ConfigDict) -> Iterator[Problem | str]:
  """Yields the problems of the rewards that a config names.

  Problems that show only with the task, or on the import of a user's module, are not included.
  """
  # The field's range check reports values of other types.
  texts = lambda field: [text for text in field if isinstance(text, str)]
  try:
    weights, settings = parse_terms(texts(config.reward.terms)), parse_settings(texts(config.reward.settings))
  except ValueError as error:
    problem = problem_of(error)
    yield problem.with_prefix("config") if isinstance(problem, Problem) else problem
    return
  for field, name in (("task.reward", config.task.get("reward")), *(("reward.terms", name) for name in weights)):
    if name is not None and (path := path_of(name)) is not None:
      yield from _judge_problems(f"config.{field}", path, config)
      continue
    if name is None or ":" in name or _section(name) is not None:
      continue
    try:
      rewards.make(name, **settings.get(name, {}))
    except ValueError as error:
      given_by = "; give them with config.reward.settings" if "found settings" in str(error) else ""
      yield f"config.{field}: {error}{given_by}"
    except TypeError as error:
      yield f"config.reward.settings: {name}: {error}"


def _judge_problems(field: str, path: str, config: ConfigDict) -> Iterator[str]:
  problems = rubric_problems(path)
  yield from (f"{field}: {problem}" for problem in problems)
  if not problems and (seconds := read_rubric(path).deadline_s) >= config.watchdog.seconds:
    limit = f"less than config.watchdog.seconds={config.watchdog.seconds:g}, which ends the run"
    yield f"{field}: {Problem(f'{path}: deadline_s', f'{seconds:g}', limit)}"
