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
# # 3. GSPO, GRPO and SAPO on the laptop job
#
# Three papers make three claims: GRPO's token ratios are noisy, and training with them is unstable
# at scale; GSPO's sequence ratio cures that; SAPO's soft gate keeps what GSPO's clip throws away.
# This lecture trains all three on the same job with the same seeds, compares the results, and asks
# what such a comparison can and cannot show.
#
# By default the lecture reads logs of five real runs that come with the repository: two seeds each
# of GRPO and GSPO, and one of SAPO. To train them here and now, set `LIVE = True` below, or set
# `JAXRL_LLM_NOTEBOOKS=live` in the environment, or run `python -m experiments.notebooks 03 --live`.
# A run takes four to six minutes on an idle laptop with two cores, and all five take half an hour.
# Runs that have finished are not repeated.

# %%
import os

from experiments.notebooks import run_pictures as show

LIVE = os.environ.get("JAXRL_LLM_NOTEBOOKS") == "live"
RUNS = {"grpo": [0, 1], "gspo": [0, 1], "sapo": [0]}

# %% [markdown]
# ## The job
#
# Problems such as `7+8-5` are solved in steps: `7+8=15`, `15-5=10`, `#10`. A transformer of 0.8M
# parameters first imitates a careless teacher, who gets each step wrong with probability 1/3, so
# that a perfect imitator is right on 47 % of these problems. Then RL takes over: 64 problems × 8
# responses per step, reward 1 for the correct final answer and 0 otherwise, advantages within each
# group, four updates per rollout batch, 40 steps. The policy is never shown correct workings again;
# it has to find out which of its own are correct.

# %%
workdirs = show.trained(RUNS, live=LIVE)
show.differences(workdirs)

# %% [markdown]
# These are all the settings in which the three differ. GSPO's band is twenty times as wide as its
# paper's, since the spread of a length-normalised ratio falls as $1/\sqrt T$, and responses here
# have 17 tokens rather than thousands ([lecture 1](01_objectives.ipynb), figure 1). GRPO has its
# paper's KL penalty by default.

# %% [markdown]
# ## Predict before you look
#
# Write down what you expect before you draw a curve; afterwards every result seems to have been
# obvious. From lecture 1 we expect:
#
# 1. **Accuracy**: no measurable difference. The policy moves little in four updates, and all three
#    gates stay close to 1 there.
# 2. **Clipping**: GSPO silences many more tokens than GRPO, by one or two orders of magnitude (its
#    paper reports 15 % against 0.13 %).
# 3. **SAPO's gate**: a mean above 0.99. At its temperatures it acts on outliers, and there are few.

# %%
show.compare(workdirs, ["accuracy", "reward", "entropy"])

# %% [markdown]
# **Figure 1. Learning.** Thick lines are means over the seeds, and thin lines are single seeds.
# What to notice: the curves of the three methods coincide, but the curves of two seeds of one
# method do not. The seed decides the initial weights, the order of the problems and every sample;
# here it matters far more than the objective. SAPO's line is seed 0 alone, which is also the worse
# seed for the other two methods.

# %%
show.outcome(workdirs)

# %% [markdown]
# Accuracy is avg@4 on 256 held-out problems. How much of a difference is evaluation noise alone? If
# all 1,024 samples were independent, half the width of a 95 % interval would be, in points:

# %%
f"{show.evaluation_noise(256, 4, 0.94):.1f}"

# %% [markdown]
# The four samples of a problem are *not* independent, however: a hard problem is hard four times.
# The intervals in the metrics are bootstraps over problems and a little wider. The seeds add to
# this: they move the final accuracy by whole points, whereas the methods move it by tenths. Had
# GRPO been run with one seed and GSPO with the other, the difference would have looked publishable.
# This is why runs are *paired*: the column "against `grpo`" compares methods within a seed. The
# column of means would mislead, since SAPO's mean is of seed 0 alone. Two seeds also bound nothing:
# a difference of one point is invisible here, in either direction. Wall times say even less,
# because these runs shared their machine with other work; compare tokens instead.

# %%
show.compare(workdirs, ["clip", "kl", "gradient", "ratio", "sequence_ratio", "no_signal"])

# %% [markdown]
# **Figure 2. The updates**, averaged over the four updates of a step. What to notice: *(a)* GSPO
# clips up to a quarter of the tokens, and GRPO less than 1 %. This is a factor of thirty; GSPO's
# paper reports a factor of a hundred, in a model tens of thousands of times larger. SAPO has no
# clip and therefore no curve. *(b)* All three move about equally far from the policy that sampled.
# *(d, e)* The 99th percentile of the token ratio stays below 1.1, and the sequence ratio's is
# smaller still. *(f)* As the policy improves, more groups are all correct and teach nothing: the
# signal runs out before the steps do. Dynamic sampling (DAPO) addresses this.

# %%
show.compare(workdirs, ["gate_pos", "gate_neg", "length"])

# %% [markdown]
# **Figure 3. SAPO's gates, and the response lengths.** What to notice: the mean gate *(a, b)* is
# within a fraction of a percent of 1. On this job SAPO is importance sampling without a clip, and
# that does no harm: with ratios this close to 1 there is nothing to guard against. Lengths *(c)*
# stay at the 17 tokens that the task needs, so this job could show neither GSPO's shrinking
# responses nor GRPO's growing ones.

# %% [markdown]
# ## What we can conclude
#
# * Expectation 1 holds within what two seeds can show (one, for SAPO), and expectations 2 and 3
#   hold clearly. At toy scale the mechanisms are visible; the advantages are not.
# * **GSPO silences many more tokens and learns as fast.** A silent token does not mean an equal
#   amount of lost signal: a clipped token has already moved in the right direction.
# * **Nothing was unstable.** The papers' case against GRPO concerns mixtures of experts, long
#   responses and thousands of steps, and none of these is present here. "No difference found" is a
#   statement about this job. To test a claim about stability, a method must be brought close to
#   where it breaks: stale data, high learning rates, many updates per rollout batch. That is the
#   purpose of [the claims](../claims/README.md). With 64 updates of each batch and all objectives
#   tuned equally, neither GSPO nor SAPO is shown to differ from GRPO
#   ([E20](../claims/staleness/README.md)); what was reproduced and what was not is in [the
#   results](../../docs/results.md).
#
# The same comparison is also available as a page for the browser, with every metric, every seed,
# and axes in steps, tokens or seconds:

# %%
show.write_page(workdirs)

# %% [markdown]
# ## Exercises
#
# 1. Give SAPO its second seed, and all three methods seeds 2 to 4 (`RUNS`, live). How wide is the
#    95 % interval of the paired difference now? How many seeds would resolve one point?
# 2. Make the data staler: `--config.learner.updates_per_rollout=16`. Which expectation fails first,
#    and for which method?
# 3. Train GSPO with its paper's band
#    (`--config.objective.clip_low=3e-4 --config.objective.clip_high=4e-4`). Predict its clip
#    fraction from figure 5 of lecture 1, then look.
# 4. Give SAPO a temperature at which its gate is ½ at $r = 1.2$. (8.8: solve
#    $\mathrm{sech}^2(\tau \cdot 0.1) = 1/2$.) Does it now behave like GRPO?
# 5. Remove GRPO's KL penalty (`--config.objective.kl_coef=0`). Which of the curves above change?
#
# ## Papers
#
# GRPO [2402.03300](https://arxiv.org/abs/2402.03300) · GSPO
# [2507.18071](https://arxiv.org/abs/2507.18071) · SAPO
# [2511.20347](https://arxiv.org/abs/2511.20347) · DAPO
# [2503.14476](https://arxiv.org/abs/2503.14476) · on how misleading a few seeds can be: *Deep
# reinforcement learning at the edge of the statistical precipice*,
# [2108.13264](https://arxiv.org/abs/2108.13264).
#
# Next: [mixtures of experts and routing replay](04_moe_routing_replay.ipynb).
