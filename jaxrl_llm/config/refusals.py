"""Settings that are legal by themselves but wrong or without effect beside one another: one table, a row for each."""

import functools
import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from jaxrl_llm.advantages.estimators import ESTIMATORS, Estimator
from jaxrl_llm.objectives import OBJECTIVES
from jaxrl_llm.types import Objective

SEQUENCE_BAND = 0.05
"""Widest clip that makes sense on a length-normalised ratio: with it no sequence of a sane run is ever clipped."""


class Settings(NamedTuple):
  """What the rows look at.

  Attributes:
    config: all of it.
    objective: objective that `config.objective` names.
    corrected: the same with the corrections of `config.correction`.
    hyper: hyper-parameters of the objective as the config gives them.
    estimator: advantage estimator that `config.advantage` names.
  """

  config: ConfigDict
  objective: Objective
  corrected: Objective
  hyper: dict[str, Any]
  estimator: Estimator

  @property
  def penalised(self) -> bool:
    """Whether the loss has a KL term."""
    return "ref_logprobs" in self.objective.needs

  @property
  def updates_once(self) -> bool:
    """Whether each rollout batch is used for one update."""
    return self.config.learner.updates_per_rollout == 1

  @property
  def lags(self) -> bool:
    """Whether rollouts, or parts of them, are drawn with older weights than those that learn from them."""
    return self.config.rollout.staleness > 0 or self.config.rollout.spare_prompts > 0

  @property
  def has_ratio(self) -> bool:
    """Whether the objective compares the policy with the one that its samples are said to come from."""
    return self.objective.ratio_level is not None

  @property
  def weighs_mismatch(self) -> bool:
    """Whether samples are weighed by π_old/μ, by a correction or by the objective itself."""
    return self.corrected.corrects_mismatch

  @property
  def reads_values(self) -> bool:
    """Whether the advantages need a critic."""
    return "values" in self.estimator.needs

  @property
  def sequence_band(self) -> float:
    """Wider side of the clip on a length-normalised ratio; 0 without one."""
    return max(self.hyper.get("clip_low") or 0, self.hyper.get("clip_high") or 0) if self.objective.ratio_level == "sequence" else 0


class Refusal(NamedTuple):
  """A row of the table.

  Attributes:
    field: dotted path that the message names.
    applies: whether these settings are the case.
    expected: what to write instead, and why; `{value_estimators}` stands for the names of the estimators
      that read a critic's values, `{critic_objectives}` for those of the objectives that can train one.
  """

  field: str
  applies: Callable[[Settings], bool]
  expected: str


REFUSALS: tuple[Refusal, ...] = (
  Refusal(
    "num_steps",
    lambda s: s.config.num_steps > 0 and s.objective.imitates,
    "0, because this objective reads no reward: RL steps would learn nothing",
  ),
  *(
    Refusal(
      f"rollout.{name}",
      lambda s, name=name: s.config.environment.name is not None and s.config.rollout[name] > 0,
      f"0, because environment.name is set: {why}",
    )
    for name, why in (
      ("staleness", "the turns of a conversation are drawn one after the other, and none beside an update"),
      ("spare_prompts", "a step learns from all of its conversations"),
      ("report_every", "a conversation is judged when it has ended"),
    )
  ),
  Refusal(
    "task.curriculum",
    lambda s: s.config.task.curriculum is not None and s.config.task.name == "mixture",
    "None, because the parts of a mixture have fixed weights",
  ),
  Refusal(
    "moe.replay",
    lambda s: s.config.environment.name is not None and s.config.moe.replay == "R3",
    "'R2', because environment.name is set: the sampler records no routes for what it did not draw",
  ),
  *(
    Refusal(
      f"environment.{name}",
      lambda s, name=name: s.config.environment.name is None and bool(s.config.environment[name]),
      "None, because environment.name is None",
    )
    for name in ("max_turn_tokens", "call_reward")
  ),
  *(
    Refusal(
      f"reward.{name}",
      lambda s, name=name, unset=unset: s.config.reward.model_path is None and s.config.reward[name] != unset,
      f"{unset}, because reward.model_path is None: there is no reward model",
    )
    for name, unset in (("model_weight", 1.0), ("model_only", False))
  ),
  Refusal(
    "objective.kl_estimator",
    lambda s: s.penalised and s.hyper.get("kl_estimator") == "k1" and s.updates_once and not s.lags,
    "another one, such as 'k1+' or 'k2', because on-policy (learner.updates_per_rollout=1) the expected gradient of k1 as a loss is zero",
  ),
  Refusal(
    "objective.clip_high",
    lambda s: s.sequence_band > SEQUENCE_BAND,
    f"clip_low and clip_high of at most {SEQUENCE_BAND}, because a length-normalised ratio stays that close to 1: the clip never binds",
  ),
  Refusal(
    "reward.kl_coef",
    lambda s: s.config.reward.kl_coef > 0 and s.penalised,
    "0, or objective.kl_coef=0: the divergence would be penalised twice, in the reward and in the loss",
  ),
  Refusal(
    "reward.kl_coef",
    lambda s: s.config.reward.kl_coef > 0 and not s.estimator.takes_kl,
    "0, because this advantage.estimator has no place for a divergence in the reward; objective.kl_coef puts it in the loss",
  ),
  Refusal(
    "reward.kl_estimator",
    lambda s: s.config.reward.kl_estimator is not None and s.config.reward.kl_coef == 0,
    "None, because reward.kl_coef is 0 and would ignore it",
  ),
  Refusal(
    "kl.target",
    lambda s: s.config.kl.target is not None and not s.penalised and s.config.reward.kl_coef == 0,
    "None, because neither objective.kl_coef nor reward.kl_coef is above 0: there is nothing to adapt",
  ),
  Refusal("kl.horizon", lambda s: s.config.kl.horizon is not None and s.config.kl.target is None, "None, because kl.target is None"),
  Refusal(
    "kl.horizon",
    lambda s: s.config.kl.target is not None
    and (s.config.kl.horizon or 10_000) <= 0.2 * s.config.rollout.num_prompts * s.config.rollout.group_size,
    "more than 0.2 x rollout.num_prompts x rollout.group_size, or one step could turn the coefficient's sign",
  ),
  Refusal(
    "advantage.estimator",
    lambda s: s.reads_values and s.objective.value_loss is None,
    "another one, or an objective with a critic ({critic_objectives}, with objective.value_coef), because this estimator reads values and "
    "this objective trains none",
  ),
  Refusal(
    "advantage.estimator",
    lambda s: not s.reads_values and s.objective.value_loss is not None,
    "{value_estimators}, because this objective trains a critic (objective.value_coef) that no other estimator reads",
  ),
  Refusal(
    "advantage.lam",
    lambda s: s.config.advantage.lam is not None and s.config.advantage.length_alpha is not None,
    "None, because advantage.length_alpha takes its place",
  ),
  Refusal(
    "advantage.pass_k",
    lambda s: s.config.advantage.pass_k is not None and s.config.advantage.pass_k > s.config.rollout.group_size,
    "at most rollout.group_size",
  ),
  Refusal(
    "learner.old_logprobs",
    lambda s: s.config.learner.old_logprobs == "sampler"
    and (s.weighs_mismatch or s.config.correction.geometric_rejection is not None),
    "'learner', because with the sampler's log-probabilities for log π_old there is no mismatch to correct",
  ),
  Refusal(
    "learner.old_logprobs",
    lambda s: s.config.learner.old_logprobs == "learner"
    and "old_logprobs" not in s.corrected.needs
    and not (s.config.reward.kl_coef or s.config.moe.replay == "R2"),
    "'sampler', because the objective does not read the learner's and the pass would buy nothing",
  ),
  Refusal(
    "learner.old_logprobs",
    lambda s: s.config.moe.replay == "R2" and s.config.learner.old_logprobs != "learner",
    "'learner', because moe.replay='R2' records routes in that pass, and log π_old belongs to them",
  ),
  Refusal(
    "moe.replay",
    lambda s: s.config.moe.replay == "R2" and s.updates_once,
    "None or 'R3', because with learner.updates_per_rollout=1 the learner's own routes are those it would take anyway",
  ),
  Refusal(
    "correction.off_policy_mask",
    lambda s: s.config.correction.off_policy_mask is not None
    and s.updates_once
    and s.config.learner.old_logprobs == "learner"
    and not (s.lags and s.config.correction.off_policy_anchor == "sampler"),
    "None, because with learner.updates_per_rollout=1 no sequence is stale; or, with rollout.staleness=1 or spare_prompts above 0, "
    "off_policy_anchor='sampler'",
  ),
  *(
    Refusal(
      f"rollout.{name}",
      lambda s, name=name: s.config.rollout[name] > 0 and not s.has_ratio and not s.weighs_mismatch,
      "0, because the objective has no ratio, and nothing would correct for the older weights; or learner.old_logprobs='learner' with "
      "correction.tis, mis or icepop",
    )
    for name in ("staleness", "spare_prompts")
  ),
  Refusal(
    "learner.old_logprobs",
    lambda s: s.lags
    and s.has_ratio
    and s.config.learner.old_logprobs == "learner"
    and "old_logprobs" in s.objective.needs
    and not (s.weighs_mismatch or s.config.correction.bypass),
    "'sampler', because with rollout.staleness=1 or spare_prompts above 0 the ratio would start at 1 however far the sampler's weights "
    "lag; or correction.tis, mis or icepop, which weigh the lag",
  ),
  Refusal(
    "rollout.staleness",
    lambda s: s.config.rollout.staleness > 0 and min(s.config.checkpoint.every, s.config.num_steps) < 2,
    "0, because the first step and those after a checkpoint never lag: with checkpoint.every=1 or num_steps below 2 none would",
  ),
  Refusal(
    "rollout.spare_prompts",
    lambda s: s.config.rollout.spare_prompts > 0 and s.config.rollout.staleness > 0,
    "0, because with rollout.staleness=1 a step is drawn before the one is known that it would carry groups from; or staleness=0",
  ),
  Refusal(
    "rollout.spare_prompts",
    lambda s: s.config.rollout.spare_prompts > 0 and s.config.num_steps < 2,
    "0, because with num_steps below 2 no step goes on with what another has begun: the spare groups would be lost",
  ),
  Refusal(
    "rollout.max_refills",
    lambda s: s.config.rollout.max_refills > 0 and s.lags,
    "0, because with rollout.staleness=1 or spare_prompts above 0 the sampler already draws for the next step; or both at 0",
  ),
  Refusal(
    "rollout.max_refills",
    lambda s: s.config.rollout.max_refills > 0 and not s.estimator.compares_groups,
    "0, because this advantage.estimator compares no samples of a group: those of equal reward teach as much as others",
  ),
  Refusal(
    "rollout.report_every",
    lambda s: s.config.rollout.report_every > 0 and s.config.rollout.staleness > 0,
    "0, because with rollout.staleness=1 the host drives the learner while rollouts are drawn, and cannot drive the sampler too; "
    "or staleness=0",
  ),
  Refusal(
    "profile.start",
    lambda s: (s.config.profile.start or 0) > s.config.num_steps,
    "at most num_steps, the last RL step: nothing would be traced",
  ),
  Refusal(
    "profile.num_steps",
    lambda s: s.config.profile.num_steps > 1 and s.config.profile.start is None,
    "1, because profile.start is None: nothing is traced",
  ),
  Refusal(
    "checkpoint.every_minutes",
    lambda s: s.config.rollout.staleness > 0 and s.config.checkpoint.every_minutes is not None,
    "None, because with rollout.staleness=1 rollouts are in flight wherever a step ends that does not save anyway; lower checkpoint.every",
  ),
  Refusal(
    "rollout.report_every",
    lambda s: s.config.rollout.report_every >= s.config.rollout.max_new_tokens and s.config.rollout.slots is None,
    "less than rollout.max_new_tokens, unless rollout.slots leaves sequences that wait: else all are done by the first report",
  ),
)
"""Every row that applies is reported; `expected` says what to do."""


def refusals(config: ConfigDict, objective: Objective, corrected: Objective) -> Iterator[str]:
  """Rows of the table that apply, and settings that the chosen estimator or the absence of a critic leaves without effect.

  Args:
    config: with fields that are legal by themselves.
    objective: objective that `config.objective` names.
    corrected: the same with the corrections of `config.correction`.
  """
  estimator = config.advantage.estimator
  hyper = {name: value for name, value in config.objective.items() if name != "name" and value is not None}
  settings = Settings(config, objective, corrected, hyper, ESTIMATORS[estimator])
  names = {
    "value_estimators": " or ".join(repr(name) for name, entry in ESTIMATORS.items() if "values" in entry.needs),
    "critic_objectives": " or ".join(name for name, make in OBJECTIVES.items() if "value_coef" in inspect.signature(make).parameters),
  }
  for row in REFUSALS:
    if row.applies(settings):
      value = functools.reduce(operator.getitem, row.field.split("."), config)
      yield f"config.{row.field}: found {value!r}, expected {row.expected.format(**names)}"
  takes = settings.estimator.defaults
  for name, value in config.advantage.items():
    if name not in ("estimator", "whiten") and value is not None and name not in takes:
      yield f"config.advantage.{name}: found {value!r}, expected None, because the estimator {estimator!r} does not read it"
  if not settings.reads_values:
    for name, value in config.critic.items():
      if value is not None:
        yield f"config.critic.{name}: found {value!r}, expected None, because advantage.estimator={estimator!r} has no critic"


# What waits for its devices, or moves between them, within one process: each setting with the value that does without.
_OF_ONE_PROCESS = {
  "rollout.report_every": (0, "responses are scored while others are drawn"),
  "rollout.spare_prompts": (0, "groups are carried from step to step"),
  "mesh.sampler": (0, "sampler and learner have devices of their own"),
}


def refuse_several_processes(config: ConfigDict, num_processes: int) -> None:
  """Refuses what works in one process only.

  Args:
    config: checked.
    num_processes: of the run.

  Raises:
    ValueError: a line for each such setting.
  """
  lines = []
  for path, (expected, what) in _OF_ONE_PROCESS.items():
    section, name = path.split(".")
    if num_processes > 1 and (found := config[section][name]) != expected:
      lines.append(f"config.{path}: found {found} in a run of {num_processes} processes, expected {expected}: only in one process {what}")
  if lines:
    raise ValueError("\n".join(lines))
