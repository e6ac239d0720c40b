# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 0. GRPO in one page: from a bandit to GSPO and SAPO
#
# This lecture takes a quarter of an hour and needs no knowledge of reinforcement learning. It
# begins with a slot machine and ends with the algorithm that trains today's reasoning models, run
# on a language model of 36 numbers. There is no config and no trainer, only functions of arrays:
# three that are written here, and two of the package. `group_advantages` is what a large run calls,
# and `objectives.value` applies the objectives of a large run to plain arrays.

# %%
import jax
import jax.numpy as jnp

from experiments.notebooks import small_policy
from jaxrl_llm import objectives
from jaxrl_llm.advantages import group_advantages

# %% [markdown]
# ## A bandit
#
# A machine has three arms, which pay 1 with the probabilities below and 0 otherwise. A policy is a
# vector of logits $\theta$, one per arm, with $\pi_\theta = \mathrm{softmax}(\theta)$. We want a
# larger expected reward $J = \sum_a \pi_\theta(a)\, p_a$ and know only what the pulls pay. Since
# $\nabla \pi = \pi\, \nabla \log \pi$, the gradient of $J$ is itself an expectation over pulls:
#
# $$\nabla J = \sum_a p_a\, \nabla \pi_\theta(a) = \mathbb{E}_{a \sim \pi_\theta}\big[R\; \nabla \log \pi_\theta(a)\big].$$
#
# So pull a few times and average. That is REINFORCE (Williams, 1992), and it is one line. The
# function below is a loss only in name: its *gradient* is the estimate, with a minus sign, because
# optimisers minimise. Its value means nothing.

# %%
pays = [0.2, 0.5, 0.8]


def reinforce(logits, arms, advantages):
  return -jnp.mean(advantages * jax.nn.log_softmax(logits)[arms])


# %% [markdown]
# ## A baseline
#
# The argument is called `advantages` and not `rewards`, because any number $b$ that does not depend
# on the arm may be subtracted from the rewards:
# $\mathbb{E}[b\, \nabla \log \pi] = b\, \nabla \sum_a \pi(a) = b\, \nabla 1 = 0$. The mean of the
# estimate stays the same. Its noise does not.

# %%
small_policy.baselines(reinforce, pays)

# %% [markdown]
# **Figure 1. A baseline costs nothing and saves samples.** The gradient of the best arm's logit,
# estimated 20,000 times from 8 pulls each, against the baseline that was subtracted. *a* The mean
# is the exact gradient, whatever the baseline. *b* The spread has a minimum. What to notice: with
# no baseline (0) it is 1.8 times the smallest one, so the same precision takes three times as many
# pulls. The expected reward (dotted) is a good baseline but not the best one. The best weighs
# rewards by the square of their gradient, which the estimator `otb` of
# [lecture 1](01_objectives.ipynb) does for each token.
#
# ## A group is its own baseline
#
# The expected reward of a question is not known. PPO
# ([1707.06347](https://arxiv.org/abs/1707.06347)) trains a second network, the critic, to guess it.
# GRPO ([2402.03300](https://arxiv.org/abs/2402.03300)) asks the same question several times: the
# baseline of a response is the mean reward of its group, and the difference is divided by the
# group's standard deviation. Here are two groups of four. The first question was answered right
# once, the second every time:

# %%
group_advantages(jnp.array([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]), 4)

# %% [markdown]
# The one right answer counts 1.5, and each of the wrong ones −0.5. The second group gets zeros: a
# question that is always answered right, or always wrong, teaches nothing.
#
# ## A language model of 36 numbers
#
# A language model is a bandit that is pulled once per token, with logits that depend on what came
# before. Ours looks at the last token only. Its vocabulary has 6 ids, so all its parameters are a
# table of 6 by 6 logits. The log-probability of a token is a look-up:

# %%
def logprobs(table, tokens):
  return jnp.take_along_axis(jax.nn.log_softmax(table)[tokens[:, :-1]], tokens[:, 1:, None], axis=-1)[..., 0]


# %% [markdown]
# The task: the prompt is one token, and the response, of four tokens, is right if no token is
# smaller than the one before it. A verifier checks that (`small_policy.is_ascending`) and returns 1
# or 0. A uniform policy is right in 10 % of its responses to prompt 0, and in one of 1,296 to
# prompt 5, which only `5 5 5 5` answers. A rollout batch has 8 responses to each of the 6 prompts.
#
# ## Stale samples and the importance ratio
#
# Drawing responses is the expensive part of training, so a batch is used for several updates. From
# the second update on, the tokens come from an older policy $\pi_\mathrm{old}$ than the one that
# learns, and the expectation above is over the wrong distribution. The importance ratio of a token,
#
# $$r_t = \frac{\pi_\theta(y_t)}{\pi_\mathrm{old}(y_t)} = \exp\big(\log \pi_\theta(y_t) - \log \pi_\mathrm{old}(y_t)\big),$$
#
# corrects for it: the surrogate is $r_t A$ in place of $A \log \pi_\theta$, with the same gradient
# at $r_t = 1$. But nothing keeps the policy near the samples, and far from them they say little.
# PPO's remedy, which GRPO took over, is the **clip**:
#
# $$\min\big(r_t A,\; \mathrm{clip}(r_t,\, 0.8,\, 1.2)\, A\big).$$
#
# A token that has become 1.2 times as likely as it was, and was rewarded for it, has no gradient
# any more. `objectives.make("grpo")` is this formula and the mean over tokens and responses, and
# `objectives.value` applies it to arrays. All of GRPO is then:

# %%
def rollout(table, key, objective):
  tokens = small_policy.draw(table, key)
  rewards = small_policy.is_ascending(tokens)
  advantages, old = group_advantages(rewards, small_policy.GROUP_SIZE), logprobs(table, tokens)

  def loss(table):
    return objectives.value(objective, logprobs(table, tokens), old, advantages, jnp.ones_like(old))

  return loss, rewards


# %% [markdown]
# Draw, verify, compare within groups, remember the old log-probabilities; then descend the loss as
# often as you like and draw again. `small_policy.train` is that loop, with plain gradient descent.
# The KL penalty of the paper is left out (`kl_coef=0`).
#
# ## GSPO and SAPO are a change of one word
#
# GSPO ([2507.18071](https://arxiv.org/abs/2507.18071)) replaces the ratio of a token by that of the
# response, $s = \big(\prod_t r_t\big)^{1/T}$, and clips whole responses. Its band is in units of
# $s$, a geometric mean; the paper's 3e-4 and 4e-4 are for thousands of tokens, and ours have four.
# SAPO ([2511.20347](https://arxiv.org/abs/2511.20347)) keeps the token ratio and replaces the clip
# by a gate that fades: the gradient of a token is multiplied by $\mathrm{sech}^2(\tau (r_t - 1) /
# 2)$, which is 1 at $r_t = 1$ and never 0. All of it is the choice of an objective:

# %%
chosen = {
  "no ratio": objectives.make("reinforce", weights="sequence_mean"),
  "GRPO": objectives.make("grpo", kl_coef=0.0),
  "GSPO": objectives.make("gspo", clip_low=0.1, clip_high=0.1),
  "SAPO": objectives.make("sapo"),
}
fresh = small_policy.train(rollout, chosen, num_updates=1)
stale = small_policy.train(rollout, chosen, num_updates=32)
small_policy.learning({"one update per batch": fresh, "32 updates per batch": stale})

# %% [markdown]
# **Figure 2. The same four objectives on fresh and on stale samples.** Mean reward of each rollout
# batch when it was drawn, at one learning rate: eight seeds (thin) and their mean (thick). *a* With
# one update per batch all four curves are the same curve, reward for reward: at $r = 1$ neither the
# ratio nor the clip nor the gate does anything. *b* With 32 updates they part. What to notice: the
# two without a clip are fastest, and some of their seeds stop below 1 and stay there. The two with
# a clip are slower, and no seed stops.

# %%
small_policy.ends(stale, batch=5)

# %% [markdown]
# A **dead prompt** is one whose eight responses in the last batch are all wrong. Its group teaches
# nothing, so it mostly stays dead: the policy became certain before it saw a right answer. [Lecture
# 2](02_read_a_run.ipynb) shows how runs that lost their entropy look from outside. Where it begins
# can be seen within the first batch:

# %%
small_policy.drift(stale, batch=0)

# %% [markdown]
# **Figure 3. Thirty-two updates of the first batch.** *a* The largest ratio of any token (median of
# eight seeds). *b* The share of tokens that a clip has silenced (mean of eight seeds). What to
# notice: all ratios are 1 in the first update. With no ratio, the probability of a lucky token goes
# on rising, to four times what it was; the clip stops near 1.4. That is above 1.2, because a
# gradient that is zero does not pull back, and because ids share rows of the table: a token moves
# with its neighbours. SAPO's gate slows the rise and does not stop it: at $\tau = 1$ it still has
# half its weight at a ratio of 2.8 (exercise 7).
#
# **What this does not show.** Which objective is best: one task of 36 parameters, one learning
# rate, which suits some of them better than others. With a band of 0.5 in place of 0.2, GRPO has a
# reward of 0.84 in batch 5 and no dead prompt in these seeds; with a band of 1 it has 0.90, and one
# seed with a dead prompt. Try it. Larger comparisons, with rules written down beforehand, are on
# the page of [claims](../claims/README.md), and many of them are inconclusive.
#
# ## From here to a real run
#
# A real run replaces the table by a transformer, plain descent by Adam and the verifier by a
# grader. The order stays: `python -m jaxrl_llm.main --config=configs/grpo.py:tiny` draws,
# grades, compares and updates, and [the train step](../../docs/train_step.md) describes its update.
#
# ## Exercises
#
# Write each as a function. [exercises.py](exercises.py) has the solutions, and
# `python -m pytest tests/experiments/test_exercises.py` checks them, or yours in their place.
#
# 1. Which part of a batch's gradient comes from a group in which all rewards are equal? Compute the
#    share of groups that teach, from the rewards of a batch.
# 2. Subtract from each reward the mean of the *others* of its group, and divide by nothing. Why is
#    this estimate of the gradient unbiased?
# 3. GRPO's mean contains the response's own reward. By which factor is the expected gradient too
#    small, if nothing is divided by the standard deviation? Does it matter?
# 4. Why does the clip never act in the first update of a batch? If every update raises the
#    log-ratio of a token by 0.05, and its advantage is positive, which update is the first without
#    a gradient?
# 5. Given ratios and advantages, which tokens does GRPO's clip silence? (There are two conditions,
#    and a ratio outside the band is not enough.)
# 6. In a response of $T$ tokens one ratio is $r$, and the others are 1. From which $r$ on does GSPO
#    clip the response, if its advantage is positive?
# 7. At which ratio above 1 has SAPO's gate the weight 1/2? Is there one below 1?
#
# ## Papers
#
# PPO [1707.06347](https://arxiv.org/abs/1707.06347) · GRPO
# [2402.03300](https://arxiv.org/abs/2402.03300) · RLOO
# [2402.14740](https://arxiv.org/abs/2402.14740) · GSPO
# [2507.18071](https://arxiv.org/abs/2507.18071) · SAPO
# [2511.20347](https://arxiv.org/abs/2511.20347). REINFORCE: R. J. Williams, *Simple statistical
# gradient-following algorithms for connectionist reinforcement learning*, Machine Learning 8, 1992.
#
# Next: [what every objective does to a token](01_objectives.ipynb).
