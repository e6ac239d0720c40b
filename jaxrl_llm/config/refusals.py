"""Settings that are legal alone but wrong or without effect in combination, as one table."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from jaxrl_llm import objectives, tasks
from jaxrl_llm.advantages import estimators
from jaxrl_llm.advantages.estimators import ESTIMATORS, Estimator
from jaxrl_llm.config import entries, policy
from jaxrl_llm.config.alarms import AlarmLimits
from jaxrl_llm.config.fields import flatten, given, unread_problems, unused
from jaxrl_llm.objectives.corrected import Term
from jaxrl_llm.objectives.distillation import ADVICE
from jaxrl_llm.objectives.mismatch import MISMATCH
from jaxrl_llm.rewards.terms import parse_terms
from jaxrl_llm.rollouts.window import steps_ahead, window_size
from jaxrl_llm.types import Objective

SEQUENCE_BAND = 0.05
"""Widest sensible clip of a length-normalised ratio: no sequence of a healthy run reaches it."""


class Chosen(NamedTuple):
  """Objects that a config names.

  Attributes:
    objective: Objective that `config.objective` names.
    corrected: Objective with the corrections of `config.correction`.
    corrections: Those corrections.
    hyper: Hyper-parameters of the objective that the config sets.
    estimator: Advantage estimator that `config.advantage` names.
    settings: Settings of the estimator, given or by default.
  """

  objective: Objective
  corrected: Objective
  corrections: list[Term]
  hyper: dict[str, Any]
  estimator: Estimator
  settings: dict[str, Any]

  @property
  def penalised(self) -> bool:
    """Whether the loss has a KL term."""
    return "ref_logprobs" in self.objective.needs

  @property
  def ignores_lag(self) -> bool:
    """Whether neither a ratio nor a weight π_old/μ corrects for older weights."""
    return self.objective.ratio_level is None and not self.corrected.corrects_mismatch

  @property
  def leaves_out_lag(self) -> bool:
    """Whether the ratio is to the old policy, unweighted by its distance from the sampler's."""
    needs = self.objective.needs & self.corrected.needs
    return "old_logprobs" in needs and self.objective.ratio_level is not None and not self.corrected.corrects_mismatch

  @property
  def selects_by_mismatch(self) -> bool:
    """Whether a correction selects tokens of the global batch by their mismatch."""
    prepares = lambda term: term.wrap(self.objective).prepare is not self.objective.prepare
    return any(term.needs >= MISMATCH and prepares(term) for term in self.corrections)

  @property
  def reads_values(self) -> bool:
    """Whether the advantages need a critic."""
    return "values" in self.estimator.needs

  def teaches_without_advantage(self, c: ConfigDict) -> bool:
    """Returns whether a response can have a gradient though its advantages are zero."""
    of_loss = self.penalised or "entropy" in self.objective.needs or not self.objective.correctable
    of_loss = of_loss or self.objective.teaches_without_advantage or c.moe.balance_coef > 0 or c.moe.z_coef > 0
    of_loss = of_loss or has_teacher(c)
    return of_loss or self.reads_values or bool({"old_entropy", "old_score_norm"} & self.estimator.needs) or c.reward.kl_coef > 0

  @property
  def sequence_band(self) -> float:
    """Wider side of the clip range of a length-normalised ratio; 0 without one."""
    return max(self.hyper.get("clip_low") or 0, self.hyper.get("clip_high") or 0) if self.objective.ratio_level == "sequence" else 0


def _lags(c: ConfigDict) -> bool:
  """Returns whether rollouts, or parts of them, are drawn with older weights than the learner's."""
  return c.rollout.staleness > 0 or c.rollout.spare_prompts > 0


def _window(c: ConfigDict) -> int:
  """Returns the number of groups in the window; 0 without one, or if other rows refuse it."""
  section = c.rollout
  is_read = section.window > 0 and section.update_in_flight is not None and section.staleness > 0
  return window_size(section.window, staleness=section.staleness, num_prompts=section.num_prompts) if is_read else 0


def _exceeds_what_is_open(c: ConfigDict) -> bool:
  """Returns whether a window is larger than all that is drawn ahead beside it."""
  window, prompts = _window(c), c.rollout.num_prompts
  ahead = steps_ahead(window, staleness=c.rollout.staleness, num_prompts=prompts) if window > 1 else 1
  return ahead < 1 or window > (ahead + 1) * prompts


def _interpolates(c: ConfigDict) -> bool:
  """Returns whether the old policy lies between the sampler's and the current one."""
  return c.learner.old_logprobs == "interpolated"


def has_teacher(c: ConfigDict) -> bool:
  """Returns whether a config names a teacher, or several."""
  return c.teacher.path is not None or c.teacher.paths is not None


def _rewards(c: ConfigDict) -> bool:
  """Returns whether some term of the reward has a weight."""
  section, is_environment = c.reward, tasks.is_of_environment(c.task.name)
  of_task = section.verifier_weight * (c.environment.weight if is_environment else 1.0)
  of_turns = c.environment.weight if c.environment.name is not None and not is_environment else 0.0
  others = any((section.model_path, section.form_weight, section.overlong_buffer, *parse_terms(section.terms).values()))
  return bool(of_task or of_turns or others) or section.at_random is not None


def _learns_nothing(c: ConfigDict) -> bool:
  """Returns whether RL steps have neither a reward nor a teacher, nor replies to learn."""
  return c.num_steps > 0 and not _rewards(c) and not has_teacher(c) and not c.learner.echo_coef


def _named_paths(c: ConfigDict) -> list[tuple[str, str]]:
  """Returns the names of several teachers, each with its path."""
  return [tuple(text.split("=", 1)) for text in c.teacher.paths or ()]


class Refusal(NamedTuple):
  """A row of the table.

  Attributes:
    field: Dotted path that the message names.
    applies: Test of a config and the objects that it names.
    expected: What to write instead, and why; `{value_estimators}` stands for the names of the
      estimators that read a critic's values, `{critic_objectives}` for those of the objectives that
      can train one.
  """

  field: str
  applies: Callable[[ConfigDict, Chosen], bool]
  expected: str


_IGNORES_LAG = (
  "0, because the objective has no ratio, and nothing would correct for the older weights; or learner.old_logprobs='learner' with "
  "the correction tis, mis or icepop"
)

_FROM_ZERO = ", because this advantage.estimator divides by the mean of a group's rewards, none of which may be negative"
_NO_REWARD = ", or another reward (reward.terms, for example) or a teacher: there is nothing to learn from"

# fmt: off
REFUSALS: tuple[Refusal, ...] = (
  Refusal("num_steps", lambda c, x: c.num_steps > 0 and x.objective.imitates,
    "0, because this objective reads no reward: RL steps would learn nothing"),
  Refusal("task.curriculum", lambda c, x: c.task.curriculum is not None and tasks.has_parts(c.task.name),
    "None, because the parts of a mixture have fixed weights"),
  Refusal("task.name", lambda c, x: tasks.is_of_environment(c.task.name) and c.environment.name is None,
    "another one, because environment.name is None, and these are the problems of an environment"),
  Refusal("teacher.path", lambda c, x: c.teacher.path is not None and not (c.teacher.opd_coef or c.teacher.gkd_coef),
    "None, or teacher.opd_coef or teacher.gkd_coef above 0: nothing would be learned from it"),
  Refusal("teacher.path", lambda c, x: c.teacher.path is not None and c.num_steps == 0,
    "None, because num_steps=0: no RL step learns from it"),
  Refusal("teacher.paths", lambda c, x: c.teacher.paths is not None and c.teacher.path is not None,
    "None, because teacher.path names the only teacher; or path=None"),
  Refusal("teacher.paths", lambda c, x: c.teacher.paths is not None and c.teacher.path is None and not c.teacher.opd_coef,
    "None, or teacher.opd_coef above 0: nothing would be learned from them"),
  Refusal("teacher.paths", lambda c, x: c.teacher.paths is not None and c.num_steps == 0,
    "None, because num_steps=0: no RL step learns from them"),
  Refusal("teacher.paths", lambda c, x: "self" in (path for _, path in _named_paths(c)),
    "checkpoints, because only a single teacher can be the policy itself"),
  Refusal("teacher.paths", lambda c, x: len({name for name, _ in _named_paths(c)}) < len(c.teacher.paths or ()),
    "a different name for each"),
  Refusal("teacher.column", lambda c, x: c.teacher.paths is not None and c.teacher.column is None,
    "the column of the problems with the names in teacher.paths"),
  Refusal("teacher.privileged", lambda c, x: c.teacher.path == "self" and c.teacher.privileged is None,
    "a prompt with more in it, such as '{{prompt}}The answer is {{answer}}.\\n': with the same prompt the teacher is the policy"),
  Refusal("teacher.frozen", lambda c, x: bool(c.teacher.frozen) and c.teacher.path == "self" and c.model.lora_rank is not None,
    "None for a policy with adapters (model.lora_rank), of which no frozen copy is kept"),
  Refusal("teacher.opd_coef", lambda c, x: ADVICE[c.teacher.advice].scales and c.teacher.opd_coef > 1,
    "a number from 0 to 1, because with this teacher.advice it is the share of an advantage that the teacher scales"),
  Refusal("teacher.advice", lambda c, x: ADVICE[c.teacher.advice].scales and has_teacher(c) and not (c.teacher.opd_coef and _rewards(c)),
    "'opd', or teacher.opd_coef above 0 and a reward: this one only scales the advantages that a reward gives"),
  Refusal("teacher.gkd_coef", lambda c, x: c.teacher.privileged is not None and c.teacher.gkd_coef > 0 and c.mesh.context != 1,
    "0 and teacher.opd_coef above 0, or mesh.context=1: with teacher.privileged, the states of the teacher lie in other slots"),
  Refusal("teacher.gkd_coef", lambda c, x: c.teacher.paths is not None and c.teacher.gkd_coef > 0,
    "0 and teacher.opd_coef above 0, because an update can compare the policy with one teacher only, and teacher.paths names several"),
  Refusal("teacher.temperature", lambda c, x: c.teacher.opd_coef > 0 and has_teacher(c) and c.teacher.temperature != c.rollout.temperature,
    "rollout.temperature, because teacher.opd_coef compares log-probabilities of the teacher with those of the policy at that temperature"),
  Refusal("rollout.top_p", lambda c, x: c.teacher.opd_coef > 0 and c.rollout.top_p < 1.0,
    "1.0, because teacher.opd_coef compares log-probabilities of the policy with those of a teacher that keeps every token"),
  Refusal("rollout.top_k", lambda c, x: c.teacher.opd_coef > 0 and c.rollout.top_k > 0,
    "0, because teacher.opd_coef compares log-probabilities of the policy with those of a teacher that keeps every token"),
  Refusal("objective.kl_estimator",
    lambda c, x: x.penalised and x.hyper.get("kl_estimator") == "k1" and c.learner.updates_per_rollout == 1 and not _lags(c),
    "another one, such as 'k1+' or 'k2', because on-policy (learner.updates_per_rollout=1) the expected gradient of k1 as a loss is zero"),
  Refusal("objective.clip_high", lambda c, x: x.sequence_band > SEQUENCE_BAND,
    f"clip_low and clip_high of at most {SEQUENCE_BAND}, because a length-normalised ratio stays that close to 1: the clip never binds"),
  Refusal("reward.kl_coef", lambda c, x: c.reward.kl_coef > 0 and x.penalised,
    "0, or objective.kl_coef=0: the divergence would be penalised twice, in the reward and in the loss"),
  Refusal("reward.kl_coef", lambda c, x: c.reward.kl_coef > 0 and not x.estimator.takes_kl,
    "0, because this advantage.estimator cannot use a divergence in the reward; objective.kl_coef puts it in the "
    "loss"),
  Refusal("reward.overlong_buffer", lambda c, x: c.reward.overlong_buffer > 0 and x.estimator.from_zero, "0" + _FROM_ZERO),
  Refusal("reward.terms", lambda c, x: x.estimator.from_zero and min(parse_terms(c.reward.terms).values(), default=0) < 0,
    "weights above 0" + _FROM_ZERO),
  Refusal("reward.verifier_weight", lambda c, x: c.reward.verifier_weight == 0 and _learns_nothing(c), "above 0" + _NO_REWARD),
  Refusal("environment.weight", lambda c, x: c.reward.verifier_weight > 0 and _learns_nothing(c), "above 0" + _NO_REWARD),
  Refusal("kl.target", lambda c, x: c.kl.target is not None and not x.penalised and c.reward.kl_coef == 0,
    "None, because neither objective.kl_coef nor reward.kl_coef is above 0: there is nothing to adapt"),
  Refusal("kl.horizon",
    lambda c, x: c.kl.target is not None and (c.kl.horizon or 10_000) <= 0.2 * c.rollout.num_prompts * c.rollout.group_size,
    "more than 0.2 x rollout.num_prompts x rollout.group_size, or one step could flip the coefficient's sign"),
  Refusal("entropy.target", lambda c, x: c.entropy.target is not None and "entropy" not in x.objective.needs,
    "None, because objective.entropy_coef is not above 0: there is no coefficient to start from"),
  Refusal("advantage.estimator", lambda c, x: x.reads_values and x.objective.value_loss is None,
    "another one, or an objective with a critic ({critic_objectives}, with objective.value_coef), because this estimator reads values and "
    "this objective trains none"),
  Refusal("advantage.estimator", lambda c, x: not x.reads_values and x.objective.value_loss is not None,
    "{value_estimators}, because this objective trains a critic (objective.value_coef) that no other estimator reads"),
  Refusal("critic.value_warmup_steps", lambda c, x: x.reads_values and (c.critic.value_warmup_steps or 0) >= c.num_steps > 0,
    "less than num_steps, or the policy would never be trained"),
  Refusal("advantage.lam", lambda c, x: c.advantage.get("lam") is not None and x.settings.get("length_alpha") is not None,
    "None, because advantage.length_alpha takes its place"),
  Refusal("rollout.group_size",
    lambda c, x: c.rollout.group_size < 2 and x.estimator.compares_groups
    and not (c.teacher.path is not None and c.reward.verifier_weight == 0),
    "2 or more, because this advantage.estimator compares the samples of one prompt; 1 is for critics, and for a teacher without a reward"),
  Refusal("advantage.min_valid", lambda c, x: (x.settings.get("min_valid") or 0) > c.rollout.group_size,
    "at most rollout.group_size (None is 3), or no group would be learned from"),
  Refusal("advantage.memory_low", lambda c, x: x.settings.get("memory_low", 0) > x.settings.get("memory_high", 1),
    "at most advantage.memory_high, the largest share of a belief that is kept"),
  Refusal("correction.terms", lambda c, x: _interpolates(c) and x.selects_by_mismatch,
    "no m2po with learner.old_logprobs='interpolated': it selects by the mismatch before the first update, which is then unknown"),
  Refusal("advantage.estimator",
    lambda c, x: _interpolates(c) and "importance" in x.estimator.needs and any(term.weighs for term in x.corrections),
    "another one, or learner.old_logprobs='learner', because this estimator reads the weights of the correction before the first update, "
    "when the interpolated policy is not known"),
  Refusal("advantage.pass_k", lambda c, x: (x.settings.get("pass_k") or 0) >= c.rollout.group_size,
    "less than rollout.group_size (None is 2): there is one best of all samples, and every advantage would be 0"),
  Refusal("advantage.decay", lambda c, x: x.settings.get("decay") == 0,
    "above 0: a game's own reward would be its baseline, and every advantage 0"),
  Refusal("learner.skip_zero_advantages", lambda c, x: c.learner.skip_zero_advantages and x.teaches_without_advantage(c),
    "False, because a response without an advantage has a gradient here (a divergence, entropy, a teacher, the critic, a pull to the old "
    "policy or a router's own loss), or its advantage is not known before the learner's pass"),
  Refusal("learner.echo_coef", lambda c, x: c.learner.echo_coef > 0 and c.learner.skip_zero_advantages,
    "0, because learner.skip_zero_advantages leaves out responses, and their replies with them; or skip_zero_advantages=False"),
  Refusal("learner.echo_coef", lambda c, x: c.learner.echo_coef > 0 and (c.rollout.top_k > 0 or c.rollout.top_p < 1),
    "0, because with rollout.top_k or rollout.top_p a reply can be impossible: its cross-entropy would be infinite; or no such filter"),
  Refusal("learner.skip_zero_advantages", lambda c, x: c.learner.skip_zero_advantages and x.corrected.prepare is not None,
    "False, because the tokens of such responses are part of the statistic by which this objective or correction selects tokens"),
  Refusal("learner.old_logprobs",
    lambda c, x: c.learner.old_logprobs == "sampler"
    and (x.corrected.corrects_mismatch or any(term.needs >= MISMATCH for term in x.corrections)),
    "'learner', because with the sampler's log-probabilities for log π_old there is no mismatch to correct"),
  Refusal("learner.old_logprobs",
    lambda c, x: c.learner.old_logprobs == "learner" and "old_logprobs" not in x.corrected.needs
    and not (c.reward.kl_coef or c.moe.replay == "R2"),
    "'sampler', because the objective does not read the learner's log-probabilities, and the pass would be wasted"),
  Refusal("learner.old_logprobs", lambda c, x: c.moe.replay == "R2" and c.learner.old_logprobs != "learner",
    "'learner', because moe.replay='R2' records routes in that pass, and log π_old must belong to those routes"),
  Refusal("moe.replay", lambda c, x: c.moe.replay == "R2" and c.learner.updates_per_rollout == 1,
    "None or 'R3', because with learner.updates_per_rollout=1 the learner takes the same routes without a replay"),
  Refusal("correction.terms",
    lambda c, x: c.learner.updates_per_rollout == 1 and c.learner.old_logprobs == "learner"
    and any(term.measures_staleness and not (_lags(c) and "sampler_logprobs" in term.needs) for term in x.corrections),
    "no off_policy_mask, because with learner.updates_per_rollout=1 no sequence is stale; or, with rollout.staleness or spare_prompts "
    "above 0, off_policy_mask:anchor=sampler"),
  Refusal("rollout.staleness", lambda c, x: c.rollout.staleness > 0 and x.ignores_lag, _IGNORES_LAG),
  Refusal("rollout.driver",
    lambda c, x: c.rollout.driver == "drain"
    and (c.environment.name is not None or c.rollout.samplers > 0 or c.rollout.update_in_flight is not None),
    "'auto' or 'loop', because only the loop draws turns as they come (environment.name), hands requests to other processes "
    "(rollout.samplers) or takes new weights in flight (rollout.update_in_flight)"),
  Refusal("mesh.sampler", lambda c, x: c.rollout.samplers > 0 and c.mesh.sampler > 0,
    "0, because with rollout.samplers above 0 other processes draw, with devices of their own"),
  Refusal("rollout.window", lambda c, x: _window(c) == 1,
    "0, or at least 2 / ((rollout.staleness + 1) * rollout.num_prompts), because with a window of one group each step learns from its own"),
  Refusal("rollout.window", lambda c, x: _exceeds_what_is_open(c),
    "less, such as 0.3 with a rollout.staleness of 2 or more, because a window of W groups takes (W - 1) / rollout.num_prompts steps of "
    "the lag, rounded up, and what is left must draw a step and the whole window ahead"),
  Refusal("rollout.spare_prompts",
    lambda c, x: c.rollout.spare_prompts > 0 and (c.rollout.update_in_flight is not None or c.rollout.staleness > 1),
    "0, because with rollout.update_in_flight or a rollout.staleness above 1 later steps' groups are drawn beside the longest of "
    "this one"),
  Refusal("moe.replay", lambda c, x: c.moe.replay == "R3" and c.rollout.update_in_flight == "recompute",
    "None or 'R2', or rollout.update_in_flight='keep', because recomputed tokens visit experts of other weights than those that drew them"),
  Refusal("rollout.spare_prompts", lambda c, x: c.rollout.spare_prompts > 0 and x.ignores_lag, _IGNORES_LAG),
  Refusal("learner.old_logprobs",
    lambda c, x: _lags(c) and c.learner.old_logprobs == "learner" and x.leaves_out_lag,
    "'sampler', because with rollout.staleness or spare_prompts above 0 the ratio would start at 1 however much "
    "the sampler's weights "
    "lag; or the correction tis, mis or icepop, which correct for the lag"),
  Refusal("learner.old_logprobs", lambda c, x: _interpolates(c) and (c.rollout.staleness == 0 or c.rollout.spare_prompts > 0),
    "'sampler' or 'learner', because the interpolation needs a lag that is known for each token: a rollout.staleness above 0, and "
    "spare_prompts=0"),
  Refusal("learner.old_logprobs", lambda c, x: _interpolates(c) and "old_logprobs" not in x.corrected.needs,
    "'sampler', because the objective does not read the old policy's log-probabilities, or the correction bypass replaces them"),
  Refusal("learner.old_logprobs",
    lambda c, x: _interpolates(c) and _lags(c) and x.leaves_out_lag,
    "'sampler', because the ratio to the interpolated policy leaves out a part of the lag; or the correction tis, mis or icepop, which "
    "correct for it"),
  Refusal("rollout.staleness", lambda c, x: c.rollout.staleness > 0 and min(c.checkpoint.every, c.num_steps) < 2,
    "0, because the first step and those after a checkpoint never lag: with checkpoint.every=1 or num_steps below "
    "2 no step would lag"),
  Refusal("rollout.spare_prompts", lambda c, x: c.rollout.spare_prompts > 0 and c.num_steps < 2,
    "0, because with num_steps below 2 no later step continues the spare groups: they would be lost"),
  Refusal("rollout.max_refills", lambda c, x: c.rollout.max_refills > 0 and c.rollout.spare_prompts > 0,
    "0, because with rollout.spare_prompts above 0 a step already draws more groups than it learns from; or spare_prompts=0"),
  Refusal("rollout.max_refills", lambda c, x: c.rollout.max_refills > 0 and not x.estimator.compares_groups,
    "0, because this advantage.estimator does not compare the samples of a group: groups of equal reward teach as "
    "much as others"),
  Refusal("eval.samples", lambda c, x: c.eval.temperature == 0 and c.eval.samples > 1 and c.environment.name is None,
    "1, because with eval.temperature=0 all samples of a problem are its greedy response"),
  Refusal("serving.layout", lambda c, x: c.serving.layout is not None and c.mesh.sampler > 0,
    "None, because mesh.sampler is above 0: mesh.sampler_expert and mesh.sampler_tensor lay out the sampler's weights"),
  Refusal("serving.layout", lambda c, x: c.serving.layout == "spread" and c.mesh.fsdp == c.mesh.expert == 1,
    "None, because mesh.fsdp and mesh.expert are 1: every device has all experts"),
  Refusal("model.sampler_dtype", lambda c, x: c.numerics.exact and c.model.sampler_dtype not in (None, c.model.dtype),
    "None, because with numerics.exact the sampler computes as the learner does"),
  Refusal("rollout.cache_dtype", lambda c, x: c.numerics.exact and c.rollout.cache_dtype not in (None, c.model.dtype),
    "None, because with numerics.exact the sampler reads the keys that the learner computes"),
  Refusal("serving.weights", lambda c, x: c.numerics.exact and c.serving.weights is not None,
    "None, because with numerics.exact the sampler computes with the learner's weights"),
  Refusal("model.attention", lambda c, x: c.numerics.exact and c.model.attention != "auto",
    "'auto', because numerics.exact has an order of its own"),
  Refusal("serving.attention", lambda c, x: c.numerics.exact and c.serving.attention != "auto",
    "'auto', because numerics.exact has an order of its own"),
  Refusal("serving.layout", lambda c, x: c.numerics.exact and c.serving.layout == "spread",
    "None or 'learner', because with numerics.exact the sampler's sums have as many parts as the learner's"),
  Refusal("mesh.context", lambda c, x: c.numerics.exact and c.mesh.context != 1,
    "1, because with numerics.exact one device adds up a sequence"),
  Refusal("rollout.spare_prompts", lambda c, x: c.numerics.exact and c.rollout.spare_prompts > 0,
    "0, because with numerics.exact no response can be continued in another step"),
  Refusal("learner.old_logprobs", lambda c, x: c.numerics.exact and c.learner.old_logprobs == "learner" and not _lags(c),
    "'sampler', because with numerics.exact and no lag the learner's log-probabilities are the same"),
  Refusal("alarms.window",
    lambda c, x: c.alarms.get("window") is not None and (limits := AlarmLimits(**c.alarms)).spike_sigmas is limits.reward_sigmas is None,
    "no value, because it is read only if alarms.spike_sigmas or alarms.reward_sigmas is set"),
  Refusal("profile.start", lambda c, x: (c.profile.start or 0) > c.num_steps,
    "at most num_steps, the last RL step: nothing would be traced"),
  Refusal("checkpoint.every_minutes", lambda c, x: c.rollout.staleness > 0 and c.checkpoint.every_minutes is not None,
    "None, because with rollout.staleness above 0 rollouts are in flight at the end of every step that does not save "
    "anyway; lower checkpoint.every"),
)
# fmt: on
"""Table of refusals; every row that applies is reported, and `expected` says what to do."""


def refusals(config: ConfigDict) -> Iterator[str]:
  """Yields a line for each row of the table that applies and for each setting without effect.

  A setting has no effect if its condition in the table of fields does not hold, or if it belongs to
  a missing critic.

  Args:
    config: Config whose fields are legal by themselves.
  """
  hyper, settings = given(config.objective, "name"), entries.values_of("advantage", config)
  objective, terms, estimator = policy.bare_objective(config), policy.corrections(config), estimators.of_section(**config.advantage)
  corrected = functools.reduce(lambda inner, term: term.wrap(inner), terms, objective)
  chosen = Chosen(objective, corrected, terms, hyper, estimator, settings)
  values = {f"advantage.{name}": x for name, x in settings.items()} | flatten(config)
  values["correction.terms"] = tuple(term.text for term in terms)
  with_critic = [name for name, make in objectives.OBJECTIVES.items() if "value_coef" in inspect.signature(make).parameters]
  of_values = [repr(name) for name, entry in ESTIMATORS.items() if "values" in entry.needs]
  names = {"value_estimators": " or ".join(of_values), "critic_objectives": " or ".join(with_critic)}
  for row in REFUSALS:
    if row.applies(config, chosen):
      yield f"config.{row.field}: found {values.get(row.field)!r}, expected {row.expected.format(**names)}"
  yield from map(str, unread_problems(config))
  if not chosen.reads_values:
    why = f"advantage.estimator={config.advantage.estimator!r} has no critic"
    yield from map(str, unused(config, [f"critic.{name}" for name in config.critic], why))
