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
# [Lecture 1](01_objectives.ipynb) took objectives apart: a log-ratio, a gate, weights. Here you put
# one together that is not in the package, check it against a theorem, look at it, and train a small
# model with it, in a few seconds. Then: how to make it permanent.
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
# A gate is a function of arrays, `(log_ratio, advantages, context) -> (surrogate, metrics)`, of
# shape $[B, T]$ each. It is *maximised*, and it returns a value for each token: no sums, no means.
# Weights come later, and not from you.
#
# * `log_ratio` has been bounded at ±20 already, so `exp` is safe.
# * `context` holds `logprobs`, `old_logprobs`, `mask` and `segments`. What stands off the mask is
#   zeroed before you see it.
# * The metrics are yours to choose. `gate_metrics(C)` reports mean, min, max and 99th percentile of
#   the coefficient; a reader who watches a run will want them.
#
# Differentiate $g$ by hand once, for the coefficient that the metrics report. With
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
# That is a whole objective. It has the metrics of every other (`ratio/*`, `actor/ppo_kl`, ...), it
# can be packed, sharded and accumulated, and penalties are settings: `kl_coef`, `entropy_coef`. The
# paper's width is 12.5, at which the pull is next to nothing; 0.3 shows what it does.
#
# ## First check: on-policy it is REINFORCE
#
# At $r = 1$ every sound policy objective has $C = 1$: the gradient is that of REINFORCE with the
# same weights. This catches most mistakes, a lost sign or a constant factor above all. The largest
# difference over the largest gradient, on a random batch with responses of different lengths:

# %%
reinforce = objectives.make("reinforce", weights="token_mean")
small_training.largest_difference(drpo, reinforce)

# %% [markdown]
# And off-policy it must *not* be REINFORCE. With log-ratios that spread by 0.1:

# %%
f"{small_training.largest_difference(drpo, reinforce, moved=0.1):.2f}"

# %% [markdown]
# ## Second check: its coefficient
#
# Drawn by differentiating the objective, not by the formula that you typed into the metrics. If the
# two disagree, one of them is wrong.

# %%
others = {"hard clip": ["grpo"], "soft gate": ["sapo"], "trust region": ["dppo_tv"]}
show.curves({"yours": [("drpo", drpo)]} | others, lowest=-1.15)

# %% [markdown]
# **Figure 1. The coefficient of DRPO** beside three others, $\pi_\mathrm{old} = 0.3$,
# $\delta = 0.3$.  What to see: for $A > 0$ (above) it rises to a maximum of 1 at $r = 1$, falls,
# reaches zero at $r = 2$, and beyond that $C$ is *negative*: the pull pushes the token back, where
# a clip would only let go. For $A < 0$ (below) it grows faster than $r$ itself: a token that should
# become rarer and has become more frequent is pushed back hard. With $\delta = 12.5$ the curve is
# nearly the straight line $C = r$; change `WIDTH` and run again.

# %% [markdown]
# ## Train with it
#
# A transformer of one layer learns a made-up language, and is then rewarded for the share of its
# tokens that lie in one half of the vocabulary (chance: one half). Twelve rollout batches of 128
# responses, four updates each, at a learning rate high enough that gates matter. GRPO gets the same
# prompts, keys and start.

# %%
trained = small_training.train({"drpo": drpo, "grpo": objectives.make("grpo", kl_coef=0.0)})
small_training.draw(trained)

# %% [markdown]
# **Figure 2. A training of seconds.** *a* Both learn. *b* The entropy first rises, as the policy
# leaves its warm start, and then falls. *c* Mean and range of $C$ in the last of the four updates:
# GRPO's reaches down to 0, where the clip binds; DRPO's has no such floor and reaches further up.
# What this does *not* show is which method is better: it is one seed of a toy. A comparison takes
# several seeds, a tuned learning rate for each method, and a rule written before the run, as in
# [the ablations](../README.md).

# %% [markdown]
# ## When something is wrong
#
# Settings that are misspelt, illegal or without effect are refused, with what was meant:

# %%
print(small_training.refusal("custom", gate="sotf"))
print(small_training.refusal("custom", gate="soft", clip_low=0.1))

# %% [markdown]
# And three mistakes that no program can refuse:
#
# 1. **A mean inside the gate.** Then micro-batches and devices change the loss. Return per-token
#    values; the weights are computed once, on the whole batch.
# 2. **`where` on the output of `exp` only.** The gradient of a masked infinity is NaN. Clamp the
#    *input*, as the log-ratio is here.
# 3. **A gradient through the anchor.** What should be a constant (a cap, a width, an importance
#    weight) needs `jax.lax.stop_gradient`. In DRPO $\pi_\mathrm{old}$ is data, so nothing is
#    needed; in MASPO the Gaussian's weight must be stopped.

# %% [markdown]
# ## Make it permanent
#
# One file, one line, one case, one config; [experiments/README.md, "Add an
# objective"](../README.md#add-an-objective) has them in full for this very gate.
#
# 1. `jaxrl_llm/objectives/drpo.py`: the gate as a factory that closes over `width`, and
#    `drpo(*, width=12.5)`, which returns the slots. The decorator
#    `@algorithm(weights="token_mean")` adds what all objectives take: `kl_coef`, `entropy_coef`,
#    `weights`, ...
# 2. Its line in `OBJECTIVES`. From now on it has refusals, corrections for a sampler that differs,
#    a place on the command line, and its place in the common list of promises that every objective
#    is tested for. No other file of the package names it.
# 3. A golden case: the gate once more as a scalar loop with its derivative, in
#    `tests/objectives/reference.py`. Loss and gradient are then checked at 1e-10 by code that
#    shares nothing with yours.
# 4. `configs/drpo.py` with `common.laptop("drpo", arg)`, and
#    `python -m jaxrl_llm.main --config=configs/drpo.py` trains it for real.
#
# ## Exercises
#
# 1. What is the largest $r$ at which DRPO's $C$ is positive, for $A > 0$, as a function of $\delta$
#    and $\pi_\mathrm{old}$? Check against figure 1.
# 2. Write a gate whose $C$ is $r$ inside $[0.8, 1.2]$ and falls linearly to 0 at 0.5 and 1.5. (Work
#    backwards: choose $C$, and use the surrogate $\mathrm{sg}[C]\, A \log \pi$ with
#    `jax.lax.stop_gradient` and `context.logprobs`.)
# 3. Use `ratio="sequence"` with your gate. Which width makes sense for responses of 24 tokens, and
#    which for 4,096?
# 4. Break the gate on purpose (drop `jnp.abs`) and see which of the two checks notices.
# 5. Train with `rollouts=30` and five seeds. What would you have to see to say that one method is
#    better?
#
# ## Papers
#
# DRPO: [2606.09821](https://arxiv.org/abs/2606.09821). PPO:
# [1707.06347](https://arxiv.org/abs/1707.06347). GRPO:
# [2402.03300](https://arxiv.org/abs/2402.03300). SAPO:
# [2511.20347](https://arxiv.org/abs/2511.20347). DPPO:
# [2602.04879](https://arxiv.org/abs/2602.04879). MASPO:
# [2602.17550](https://arxiv.org/abs/2602.17550).
