"""Credit assignment: per-token advantages of a rollout batch, by the configured estimator."""

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm import advantages as adv
from jaxrl_llm.messages import Problem, did_you_mean
from jaxrl_llm.settings import import_path
from jaxrl_llm.settings.values import ABOVE_ZERO, COUNT, NOT_NEGATIVE, NUMBER, UNIT, at_least


class Evidence(NamedTuple):
  """Inputs for the advantages of a rollout batch.

  A batch has N sequences, G consecutive ones per prompt, with R response slots each. Some of them
  may not be learned from (`mask`), such as truncated ones. They are part of every statistic all the
  same (`valid`, `written`, `step_ends`): leaving them out would change what others are compared
  with.

  Attributes:
    rewards: Total reward of each sequence.
    parts: Each of the K rewards separately, unweighted.
    mask: 1 if a slot holds a token that is learned from.
    valid: True for a sequence that has a reward. A sequence without one is left out of all
      statistics. None if all are valid.
    weights: Weight of each of the K rewards in the total; None if all are 1.
    written: 1 if a slot holds a token that the policy wrote, learned from or not; None if all such
      tokens are learned from.
    kl: Estimated divergence from the reference at each token, in nats; None if the reward has no
      such term.
    kl_coef: Reward lost per nat of `kl`.
    values: Critic's value of the state before each token; None without a critic.
    step_rewards: Reward of the step that ends at each token; None if the estimator reads no steps.
    step_ends: True if a step ends at the token, whether or not the token is learned from.
    step_states: Number, below N·R, of the state in which the step that ends at the token began; two
      steps have the same one if they belong to the same prompt and began in the same state. None if
      the estimator reads no states.
    old_entropy: Entropy of the policy that drew the tokens at each of them, in nats; None if the
      estimator does not read it.
    old_score_norm: Squared norm of the gradient of each token's log-probability in the logits of
      the policy that drew it; None if the estimator does not read it, or to count tokens alike, by
      which a group of equal rewards is told from others before the learner's pass.
    importance: Weight of each token's policy term for the mismatch of learner and sampler; None if
      nothing corrects it, or if the estimator does not read it.
    role_baselines: Baseline of each role before this batch; None if the estimator has no roles.
    beliefs: Belief in the pass rate of each sequence's prompt before this batch: the parameters of
      a Beta distribution; None if the estimator has none, or for the first ones.
    drift: Mean change of the log-probability of a token of the prompt's last response, in nats;
      None for none.
  """

  rewards: Float[Array, " N"]
  parts: Float[Array, "K N"]
  mask: Float[Array, "N R"]
  valid: Bool[Array, " N"] | None = None
  weights: Float[Array, " K"] | None = None
  written: Float[Array, "N R"] | None = None
  kl: Float[Array, "N R"] | None = None
  kl_coef: Float[Array, ""] | float = 0.0
  values: Float[Array, "N R"] | None = None
  step_rewards: Float[Array, "N R"] | None = None
  step_ends: Bool[Array, "N R"] | None = None
  step_states: Int[Array, "N R"] | None = None
  old_entropy: Float[Array, "N R"] | None = None
  old_score_norm: Float[Array, "N R"] | None = None
  importance: Float[Array, "N R"] | None = None
  role_baselines: Float[Array, " P"] | None = None
  beliefs: Float[Array, "N 2"] | None = None
  drift: Float[Array, " N"] | None = None


class Credit(NamedTuple):
  """Advantages, with value targets if there is a critic.

  Attributes:
    advantages: Advantage of each token; zero outside the mask.
    returns: Value targets; None without a critic.
    metrics: Scalars to log.
    role_baselines: Baseline of each role for the next batch; None if the estimator has no roles.
    beliefs: Belief in the pass rate of each of the n prompts after the batch; None if the estimator
      has none.
  """

  advantages: Float[Array, "N R"]
  returns: Float[Array, "N R"] | None = None
  metrics: Mapping[str, Array] = MappingProxyType({})
  role_baselines: Float[Array, " P"] | None = None
  beliefs: Float[Array, "n 2"] | None = None


class Estimator(NamedTuple):
  """A method of computing advantages.

  Attributes:
    estimate: `(evidence, group_size, **settings) -> Credit`; its advantages are [N R], or [N] if
      they hold for whole sequences. Its docstring describes the settings.
    defaults: Settings of the estimator, with their default values. `RULES` has their legal values.
    needs: Optional fields of `Evidence` that the estimator reads.
    takes_kl: Whether the reward may contain a divergence term.
    from_zero: Whether rewards must be 0 or more.
    whole_groups: Whether the estimator compares whole groups, so that a group counts only if all of
      its samples have a reward.
    compares_groups: Whether the estimator compares the samples of one prompt, so that a group of
      equal rewards carries no signal.
  """

  estimate: Callable[..., Credit]
  defaults: Mapping[str, Any] = MappingProxyType({})
  needs: frozenset[str] = frozenset()
  takes_kl: bool = True
  from_zero: bool = False
  whole_groups: bool = False
  compares_groups: bool = True


def _compared(evidence: Evidence, group_size: int) -> Evidence:
  """Returns the evidence that statistics are made of: that of all sequences that have a reward.

  Groups of `group_size` without all of their rewards are left out.
  """
  valid, ends = evidence.valid, evidence.step_ends
  mask = evidence.mask if evidence.written is None else evidence.written
  if valid is not None:
    valid = jnp.repeat(jnp.all(jnp.asarray(valid).reshape(-1, group_size), axis=1), group_size)
    mask = jnp.where(valid[:, None], mask, 0)
    ends = None if ends is None else jnp.asarray(ends) & valid[:, None]
  return evidence._replace(mask=mask, valid=valid, step_ends=ends)


def _penalised(evidence: Evidence) -> Float[Array, " N"]:
  """Returns sequence rewards minus the divergence of each sequence."""
  if evidence.kl is None:
    return evidence.rewards
  return evidence.rewards - evidence.kl_coef * jnp.sum(jnp.where(evidence.mask > 0, evidence.kl, 0), axis=1)


def _per_token(evidence: Evidence) -> Float[Array, "N R"]:
  kl_coef = 0.0 if evidence.kl is None else evidence.kl_coef
  return adv.token_rewards(evidence.rewards, evidence.mask, evidence.kl, kl_coef)


def _of_samples(advantages_of: Callable[..., Array]) -> Callable[..., Credit]:
  """Makes the estimate of a function of the samples' rewards, which leaves out missing ones."""

  def estimate(evidence, group_size, **settings):
    return Credit(advantages_of(_penalised(evidence), group_size, valid=evidence.valid, **settings))

  estimate.__doc__ = advantages_of.__doc__

  return estimate


def _rloo_n(evidence, group_size, *, min_valid):
  """Does as `leave_one_out` in groups of enough rewards, and leaves out smaller ones (RLOO-N).

  Args:
    min_valid: Smallest number of valid samples that a group learns from, from 2 to G. The baseline
      of a smaller group is left out as too noisy.
  """
  return Credit(adv.leave_one_out_advantages(_penalised(evidence), group_size, valid=evidence.valid, min_valid=min_valid))


def _maxrl(evidence, group_size):
  """Divides each reward's distance from the mean of its prompt by that mean (MaxRL)."""
  return Credit(adv.maxrl_advantages(evidence.rewards, group_size, valid=evidence.valid))


def _opo(evidence, group_size):
  """Compares each reward with the mean of its prompt, weighted by length (OPO)."""
  lengths = jnp.sum(evidence.mask > 0, axis=1)
  return Credit(adv.opo_advantages(_penalised(evidence), lengths, group_size, valid=evidence.valid))


def _otb(evidence, group_size):
  """Compares the reward, at each token, with a mean weighted by the gradients so far (OTB)."""
  norms = jnp.ones_like(evidence.mask) if evidence.old_score_norm is None else evidence.old_score_norm
  norms = norms if evidence.importance is None else norms * jnp.square(evidence.importance)
  return Credit(adv.otb_advantages(evidence.rewards, norms, evidence.mask, group_size, valid=evidence.valid))


def _pass_at_k(evidence, group_size, *, pass_k, normalize_std):
  """Credits each sample with what it adds to the best of k (Pass@k Training).

  Args:
    pass_k: Number of samples of which the best one counts, below rollout.group_size.
    normalize_std: Whether to divide by the standard deviation of the maximum.
  """
  return Credit(adv.pass_at_k_advantages(_penalised(evidence), group_size, k=pass_k, normalize_std=normalize_std))


def _per_reward(evidence, group_size, *, normalize_std):
  """Normalises each of several rewards by itself, and adds them by their weights (GDPO).

  Args:
    normalize_std: Whether to divide each reward by its group's standard deviation.
  """
  weights = jnp.ones(len(evidence.parts)) if evidence.weights is None else evidence.weights
  return Credit(adv.per_reward_advantages(evidence.parts, weights, group_size, normalize_std=normalize_std, valid=evidence.valid))


def _of_steps(evidence: Evidence) -> tuple[Array, Array, Array]:
  """Returns the rewards of steps, their ends, and a mask in which all of them end."""
  return evidence.step_rewards, evidence.step_ends, jnp.where(evidence.step_ends, 1, evidence.mask)


def _steps(evidence, group_size, *, normalize_std):
  """Gives each token the rewards of the steps that have not ended yet (process supervision).

  Args:
    normalize_std: Whether to divide by the standard deviation of the group's steps.
  """
  return Credit(adv.step_advantages(*_of_steps(evidence), group_size, normalize_std=normalize_std))


def _gigpo(evidence, group_size, *, episode_weight, step_weight, gamma, normalize_std):
  """Compares responses of a prompt, and their steps that began in the same state (GiGPO).

  Args:
    episode_weight: Weight of the response's advantage.
    step_weight: Weight of the step's advantage.
    gamma: Discount per step.
    normalize_std: Whether to divide by the standard deviations.
  """
  gains, ends, mask = _of_steps(evidence)
  settings = dict(episode_weight=episode_weight, step_weight=step_weight, gamma=gamma, normalize_std=normalize_std, valid=evidence.valid)
  advantages = adv.gigpo_advantages(evidence.rewards, gains, ends, evidence.step_states, mask, group_size, **settings)
  return Credit(advantages, metrics=_state_metrics(evidence))


def _hierarchical(evidence, group_size, *, challenge):
  """Compares proposals from one source, and attempts at one proposed problem (hierarchical GRPO).

  Args:
    challenge: Reward of a proposal that half of the attempts solve.
  """
  del group_size
  gains, ends, mask = _of_steps(evidence)
  return Credit(adv.hierarchical_advantages(gains, ends, evidence.step_states, mask, challenge=challenge), metrics=_state_metrics(evidence))


def _state_metrics(evidence: Evidence) -> dict[str, Array]:
  return {"critic/steps_per_state": adv.steps_per_state(evidence.step_ends, evidence.step_states)}


def _gtpo(evidence, group_size, *, entropy_share, right_above):
  """Favours uncertain tokens of right responses, and punishes certain ones of wrong ones (GTPO).

  Args:
    entropy_share: Weight of the entropy in the rewards of tokens, beside 1 for the outcome.
    right_above: Reward above which a response counts as right.
  """
  rewards, entropy, mask = evidence.rewards, evidence.old_entropy, evidence.mask
  return Credit(adv.gtpo_advantages(rewards, entropy, mask, group_size, entropy_share=entropy_share, right_above=right_above))


def _rae(evidence, group_size, *, num_roles, decay, zero_sum):
  """Compares the rewards of turns with a running mean of their role (RAE, for self-play).

  Args:
    num_roles: Roles that take turns in a conversation; turn k is played by role k mod num_roles.
    decay: Share of a role's running mean of rewards that one game leaves in place.
    zero_sum: Whether a role loses what the others win; False gives it the rewards of its own turns.
  """
  del group_size
  baselines = jnp.zeros(num_roles) if evidence.role_baselines is None else evidence.role_baselines
  advantages, after = adv.role_advantages(*_of_steps(evidence), baselines, decay=decay, zero_sum=zero_sum)
  return Credit(advantages, role_baselines=after)


def _spo(evidence, group_size, *, half_drift, memory_low, memory_high):
  """Compares single responses with a belief of their prompt's pass rate, and whitens (SPO).

  Args:
    half_drift: Drift of the policy, in nats per token, that halves the memory of the belief.
    memory_low: Smallest share of the belief that is kept.
    memory_high: Largest share of the belief that is kept.
  """
  settings = dict(half_drift=half_drift, memory_low=memory_low, memory_high=memory_high)
  rewards, number = evidence.rewards, len(evidence.rewards)
  beliefs = jnp.tile(jnp.array(adv.FIRST_BELIEF, rewards.dtype), (number, 1)) if evidence.beliefs is None else evidence.beliefs
  drift = jnp.zeros(number) if evidence.drift is None else evidence.drift
  advantages, after = adv.spo_advantages(rewards, beliefs, drift, group_size, valid=evidence.valid, **settings)
  return Credit(advantages, beliefs=after)


def _returns(evidence, group_size, *, gamma):
  """Gives each token the rewards from it on (with `whiten`, those of REINFORCE++).

  Args:
    gamma: Discount per token.
  """
  del group_size
  return Credit(adv.returns_to_go(_per_token(evidence), evidence.mask, gamma=gamma))


def _gae(evidence, group_size, *, gamma, lam, critic_lam, length_alpha):
  """Compares rewards with a critic's values (GAE for PPO; VAPO with `length_alpha`).

  Args:
    gamma: Discount per token.
    lam: Lambda for the policy's advantages.
    critic_lam: Lambda for the critic's targets.
    length_alpha: Lambda is 1 - 1 / (length_alpha * length) for the policy, in place of `lam`.
  """
  del group_size
  rewards, values, mask = _per_token(evidence), evidence.values, evidence.mask
  policy_lam = lam if length_alpha is None else adv.length_adaptive_lambda(mask, alpha=length_alpha)
  advantages = adv.generalized_advantages(rewards, values, mask, gamma=gamma, lam=policy_lam)
  targets = adv.generalized_advantages(rewards, values, mask, gamma=gamma, lam=critic_lam) + jnp.where(mask > 0, values, 0)
  return Credit(advantages, targets)


ESTIMATORS = {
  "group": Estimator(_of_samples(adv.group_advantages), {"normalize_std": True}),
  "leave_one_out": Estimator(_of_samples(adv.leave_one_out_advantages), {}),
  "rloo_n": Estimator(_rloo_n, {"min_valid": 3}),
  # A divergence would make rewards of 0 negative.
  "maxrl": Estimator(_maxrl, {}, takes_kl=False, from_zero=True),
  "batch_scaled": Estimator(_of_samples(adv.batch_scaled_advantages), {}),
  "opo": Estimator(_opo, {}),
  "otb": Estimator(_otb, {}, frozenset({"old_score_norm", "importance"}), takes_kl=False),
  "pass_at_k": Estimator(_pass_at_k, {"pass_k": 2, "normalize_std": True}, whole_groups=True),
  "per_reward": Estimator(_per_reward, {"normalize_std": True}, takes_kl=False),
  "steps": Estimator(_steps, {"normalize_std": True}, frozenset({"step_rewards", "step_ends"}), takes_kl=False, whole_groups=True),
  "gigpo": Estimator(
    _gigpo, {"episode_weight": 1.0, "step_weight": 1.0, "gamma": 0.95, "normalize_std": True},
    frozenset({"step_rewards", "step_ends", "step_states"}), takes_kl=False,
  ),
  "hierarchical": Estimator(
    _hierarchical, {"challenge": 1.0}, frozenset({"step_rewards", "step_ends", "step_states"}), takes_kl=False,
  ),
  "gtpo": Estimator(
    _gtpo, {"entropy_share": 0.1, "right_above": 0.5}, frozenset({"old_entropy"}), takes_kl=False, compares_groups=False
  ),
  "rae": Estimator(
    _rae, {"num_roles": 2, "decay": 0.95, "zero_sum": True}, frozenset({"step_rewards", "step_ends"}), takes_kl=False,
    compares_groups=False,
  ),
  "spo": Estimator(
    _spo, {"half_drift": 0.06, "memory_low": 0.875, "memory_high": 0.96}, frozenset({"beliefs", "drift"}), takes_kl=False,
    compares_groups=False,
  ),
  "returns": Estimator(_returns, {"gamma": 1.0}, compares_groups=False),
  "gae": Estimator(_gae, {"gamma": 1.0, "lam": 1.0, "critic_lam": 1.0, "length_alpha": None}, frozenset({"values"}), compares_groups=False),
}
"""Estimators by name."""


RULES = {
  "min_valid": at_least(2, "a baseline is made of the other samples"),
  "entropy_share": ABOVE_ZERO,
  "right_above": NUMBER,
  "num_roles": COUNT,
  "decay": UNIT,
  "pass_k": COUNT,
  "episode_weight": NOT_NEGATIVE,
  "step_weight": NOT_NEGATIVE,
  "challenge": NOT_NEGATIVE,
  "gamma": UNIT,
  "lam": UNIT,
  "critic_lam": UNIT,
  "length_alpha": ABOVE_ZERO,
  "half_drift": ABOVE_ZERO,
  "memory_low": UNIT,
  "memory_high": UNIT,
}
"""Legal values of settings by name, which mean the same in every estimator; others have a type."""


def factory(name: str) -> Callable[..., Estimator]:
  """Returns the function of settings by keyword that makes an estimator.

  Args:
    name: Key of `ESTIMATORS`, or import path MODULE:FUNCTION of such a function.

  Raises:
    ValueError: If there is no such estimator. One line, with the fix.

  Example:
    >>> inspect.signature(factory("pass_at_k"))
    <Signature (*, pass_k=2, normalize_std=True)>
  """
  if ":" in name:
    return import_path.load_factory(name, where=f"advantage.estimator {name!r}")
  if name not in ESTIMATORS:
    names = ", ".join(ESTIMATORS)
    raise ValueError(Problem("advantage.estimator", repr(name), f"one of {names}, MODULE:FUNCTION{did_you_mean(name, ESTIMATORS)}"))
  row = ESTIMATORS[name]

  def bound(**settings: Any) -> Estimator:
    return row._replace(estimate=functools.partial(row.estimate, **row.defaults | settings), defaults={})

  annotations = getattr(row.estimate, "__annotations__", {})
  settings = [
    inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=x, annotation=annotations.get(key, inspect.Parameter.empty))
    for key, x in row.defaults.items()
  ]
  bound.__signature__, bound.__doc__ = inspect.Signature(settings), row.estimate.__doc__
  return bound


def make(name: str, **settings: Any) -> Estimator:
  """Returns an estimator with its settings bound, so that it has no more of them.

  Args:
    name: Name of the estimator; see `factory`.
    **settings: Settings of the estimator. Omitted ones have their defaults.

  Raises:
    ValueError: If there is no such estimator, or the user's own cannot be made. One line.
  """
  return import_path.make(factory(name), settings, Estimator, where=f"advantage.estimator {name!r}")


def of_section(estimator: str, *, whiten: bool = False, **settings: Any) -> Estimator:
  """Returns the estimator of the section `advantage` of a config; a setting of None is left out."""
  del whiten
  return make(estimator, **{name: x for name, x in settings.items() if x is not None})


def first_baselines(estimator: str, **settings: Any) -> list[float] | None:
  """Returns the baselines before the first batch: 0 for each role; None without roles.

  Example:
    >>> first_baselines("rae"), first_baselines("group")
    ([0.0, 0.0], None)
  """
  roles = inspect.signature(factory(estimator)).parameters.get("num_roles")
  return None if roles is None else [0.0] * settings.get("num_roles", roles.default)


def make_credit(estimator: str | Estimator, group_size: int, *, whiten: bool = False, **settings: Any) -> Callable[[Evidence], Credit]:
  """Returns the jitted function from evidence to credit.

  Args:
    estimator: Estimator without settings, or its name; see `factory`.
    group_size: Number of samples per prompt (G).
    whiten: Whether to subtract the batch's mean from the advantages and divide by its standard
      deviation, over all tokens that the policy wrote.
    **settings: Settings of an estimator that is given by its name.

  Returns:
    The function. Its metrics are those of the estimator, and with a critic
    `critic/vf_explained_var`, from before this batch's updates.

  Note:
    Which sequences are learned from changes no advantage of the others. Some implementations take
    one mask for both, so that truncated responses that are left out move the advantages of their
    group (OpenRLHF#1239, verl#6452).

  Example:
    >>> credit = make_credit("leave_one_out", 2)(Evidence(jnp.array([1., 0.]), jnp.ones((1, 2)), jnp.array([[1., 1.], [1., 0.]])))
    >>> credit.advantages.tolist()
    [[1.0, 1.0], [-1.0, 0.0]]
  """
  chosen = make(estimator, **settings) if isinstance(estimator, str) else estimator

  def credit(evidence: Evidence) -> Credit:
    compared = _compared(evidence, group_size if chosen.whole_groups else 1)
    learned = (evidence.mask > 0) & (compared.mask > 0)
    advantages, returns, metrics, baselines, beliefs = chosen.estimate(compared, group_size)
    if advantages.ndim == 1:
      advantages = jnp.broadcast_to(advantages[:, None], learned.shape)
    if whiten:
      advantages = adv.whiten(advantages, compared.mask)
    metrics = dict(metrics)
    if returns is not None:
      returns = jnp.where(learned, returns, 0)
      metrics["critic/vf_explained_var"] = adv.explained_variance(evidence.values, returns, learned)
    if baselines is not None:
      metrics |= {f"critic/baseline/role_{role}": x for role, x in enumerate(baselines)}
    if beliefs is not None:
      metrics["critic/belief/pass_rate"] = jnp.mean(beliefs[:, 0] / jnp.sum(beliefs, axis=1))
      metrics["critic/belief/samples"] = jnp.mean(jnp.sum(beliefs, axis=1))
    return Credit(jnp.where(learned, advantages, 0), returns, metrics, baselines, beliefs)

  return jax.jit(credit)
