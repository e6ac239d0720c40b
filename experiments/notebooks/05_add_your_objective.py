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
# # 5. Add your objective: from a gate to a trained model
#
# [Lecture 1](01_objectives.ipynb) took objectives apart into a log-ratio, a gate and weights. This
# lecture assembles one that is not in the package, checks it against a theorem, plots it, and
# trains a small model with it in a few seconds. Finally it shows how to make the objective
# permanent.
#
# The example is DRPO ([2606.09821](https://arxiv.org/abs/2606.09821)). Its surrogate is plain
# importance sampling with a quadratic pull back to the old policy:
#
# $$g(r, A) \;=\; r A \;-\; |A|\, \pi_\mathrm{old}\, \frac{(r - 1)^2}{2\delta}.$$

# %%
import jax.numpy as jnp

from experiments.notebooks import objective_pictures as show
from experiments.notebooks import small_training
from jaxrl_llm import objectives
from jaxrl_llm.objectives.gate_statistics import gate_metrics

# %% [markdown]
# ## The gate
#
# A gate is a function of arrays, `(log_ratio, advantages, context) -> (surrogate, metrics)`, with
# shape $[B, T]$ each. The surrogate is *maximised*, and it has one value per token, without sums or
# means. The weights are applied later, by the package.
#
# * `log_ratio` is already bounded at ±20, so `exp` is safe.
# * `context` holds `logprobs`, `old_logprobs`, `mask` and `segments`. Values outside the mask are
#   set to zero before the gate is called.
# * The metrics are yours to choose. `gate_metrics(C)` reports the mean, minimum, maximum and 99th
#   percentile of the coefficient, which are useful when monitoring a run.
#
# Differentiate $g$ by hand once, to get the coefficient that the metrics report. With
# $\partial r / \partial \log \pi = r$,
#
# $$C = \frac{1}{A} \frac{\partial g}{\partial \log \pi} = r \left(1 - \mathrm{sign}(A)\, \pi_\mathrm{old}\, \frac{r - 1}{\delta}\right).$$

# %%
WIDTH = 0.3


def quadratic_pull(log_ratio, advantages, context):
  ratio, old_probability = jnp.exp(log_ratio), jnp.exp(context.old_logprobs)
  pull = old_probability * jnp.square(ratio - 1) / (2 * WIDTH)
  surrogate = ratio * advantages - jnp.abs(advantages) * pull
  coefficient = ratio * (1 - jnp.sign(advantages) * old_probability * (ratio - 1) / WIDTH)
  return surrogate, gate_metrics(coefficient)


drpo = objectives.make("custom", ratio="token", gate=quadratic_pull, weights="token_mean")

# %% [markdown]
# That is a complete objective. It has the metrics that every objective has (`ratio/*`,
# `actor/ppo_kl`, ...), it supports packing, sharding and gradient accumulation, and its penalties
# are settings: `kl_coef`, `entropy_coef`. The paper's width is 12.5, at which the pull is almost
# negligible; 0.3 makes its effect visible.
#
# ## First check: on-policy it is REINFORCE
#
# At $r = 1$ every sound policy objective has $C = 1$: its gradient equals REINFORCE's with the same
# weights. This check catches most mistakes, above all a lost sign or a constant factor. The cell
# below prints the largest difference relative to the largest gradient, on a random batch with
# responses of different lengths:

# %%
reinforce = objectives.make("reinforce", weights="token_mean")
small_training.largest_difference(drpo, reinforce)

# %% [markdown]
# Off-policy, on the other hand, it must *not* equal REINFORCE. With log-ratios that spread by 0.1:

# %%
f"{small_training.largest_difference(drpo, reinforce, moved=0.1):.2f}"

# %% [markdown]
# ## Second check: its coefficient
#
# The curve is drawn by differentiating the objective, independently of the formula that you typed
# into the metrics. If the two disagree, one of them is wrong.

# %%
others = {"hard clip": ["grpo"], "soft gate": ["sapo"], "trust region": ["dppo_tv"]}
show.curves({"yours": [("drpo", drpo)]} | others, lowest=-1.15)

# %% [markdown]
# **Figure 1. The coefficient of DRPO** beside three others, $\pi_\mathrm{old} = 0.3$,
# $\delta = 0.3$. What to notice: for $A > 0$ (above) $C$ rises to a maximum of 1 at $r = 1$, falls,
# and reaches zero at $r = 2$. Beyond that $C$ is *negative*: the pull pushes the token back, where
# a clip would only let go. For $A < 0$ (below) $C$ grows faster than $r$ itself: a token that
# should become rarer but has become more frequent is pushed back hard. With $\delta = 12.5$ the
# curve is nearly the straight line $C = r$; change `WIDTH` and run the cells again.

# %% [markdown]
# ## Train with it
#
# A transformer of one layer learns a synthetic language, and is then rewarded for the share of its
# tokens that lie in one half of the vocabulary (by chance, one half). The training takes twelve
# rollout batches of 128 responses, with four updates each, at a learning rate high enough that the
# gates matter. GRPO starts from the same weights and gets the same prompts and random keys.

# %%
trained = small_training.train({"drpo": drpo, "grpo": objectives.make("grpo", kl_coef=0.0)})
small_training.draw(trained)

# %% [markdown]
# **Figure 2. Training in seconds.** *a* Both objectives learn. *b* The entropy first rises, as the
# policy leaves its warm start, and then falls. *c* Mean and range of $C$ in the last of the four
# updates: GRPO's range reaches down to 0, where the clip binds; DRPO's has no such floor and
# reaches further up. The figure does *not* show which method is better: it is one seed of a toy
# problem. A comparison takes several seeds, a tuned learning rate for each method, and a rule
# written before the run, as in [the ablations](../README.md).

# %% [markdown]
# ## When something is wrong
#
# Settings that are misspelt, illegal or without effect are rejected, and the message names the
# expected value:

# %%
print(small_training.refusal("custom", gate="sotf"))
print(small_training.refusal("custom", gate="soft", clip_low=0.1))

# %% [markdown]
# Three mistakes cannot be detected by any program:
#
# 1. **A mean inside the gate.** The loss then depends on the number of micro-batches and devices.
#    Return per-token values; the weights are computed once, on the whole batch.
# 2. **`where` on the output of `exp` only.** The gradient of a masked infinity is NaN. Clamp the
#    *input*, as is done for the log-ratio here.
# 3. **A gradient through the anchor.** Quantities that should be constant (a cap, a width, an
#    importance weight) need `jax.lax.stop_gradient`. In DRPO $\pi_\mathrm{old}$ is data, so nothing
#    is needed; in MASPO the gradient through the Gaussian's weight must be stopped.

# %% [markdown]
# ## Make it permanent
#
# A permanent objective takes one file, one line, one test case and one config.
# [experiments/README.md, "Add an objective"](../README.md#add-an-objective) gives them in full for
# this very gate.
#
# 1. The file `jaxrl_llm/objectives/drpo.py`: the gate as a factory that closes over `width`, and
#    `drpo(*, width=12.5)`, which returns the slots. The decorator
#    `@algorithm(weights="token_mean")` adds the settings that all objectives share: `kl_coef`,
#    `entropy_coef`, `weights`, ...
# 2. Its line in `OBJECTIVES`. From then on the objective has validated settings, corrections for a
#    sampler that differs from the learner, and a place on the command line, and it is covered by
#    the tests of the properties that every objective must have. No other file of the package names
#    it.
# 3. A golden case in `tests/objectives/reference.py`: the gate written a second time, as a scalar
#    loop with its derivative. Loss and gradient are then checked to 1e-10 against code that shares
#    nothing with the gate.
# 4. The config `configs/drpo.py` with `common.laptop("drpo", arg)`;
#    `python -m jaxrl_llm.main --config=configs/drpo.py` then trains it for real.
#
# ## Exercises
#
# 1. What is the largest $r$ at which DRPO's $C$ is positive, for $A > 0$, as a function of $\delta$
#    and $\pi_\mathrm{old}$? Check your answer against figure 1.
# 2. Write a gate whose $C$ is $r$ inside $[0.8, 1.2]$ and falls linearly to 0 at 0.5 and 1.5. (Work
#    backwards: choose $C$, and use the surrogate $\mathrm{sg}[C]\, A \log \pi$ with
#    `jax.lax.stop_gradient` and `context.logprobs`.)
# 3. Use `ratio="sequence"` with your gate. Which width makes sense for responses of 24 tokens, and
#    which for 4,096?
# 4. Break the gate on purpose (drop `jnp.abs`), and find out which of the two checks notices.
# 5. Train with `rollouts=30` and five seeds. What evidence would you need to conclude that one
#    method is better?
#
# ## Papers
#
# DRPO: [2606.09821](https://arxiv.org/abs/2606.09821). PPO:
# [1707.06347](https://arxiv.org/abs/1707.06347). GRPO:
# [2402.03300](https://arxiv.org/abs/2402.03300). SAPO:
# [2511.20347](https://arxiv.org/abs/2511.20347). DPPO:
# [2602.04879](https://arxiv.org/abs/2602.04879). MASPO:
# [2602.17550](https://arxiv.org/abs/2602.17550).
#
# Next: [learning from a teacher](06_learning_from_a_teacher.ipynb).
