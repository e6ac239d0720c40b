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
# Three papers, three claims: GRPO's token ratios are noisy and train unstably at scale; GSPO's
# sequence ratio cures that; SAPO's soft gate keeps what GSPO's clip throws away. This lecture
# trains all three on the same job with the same seeds, compares what happened, and asks what such a
# comparison can and cannot tell.
#
# By default it reads logs of five real runs that came with the repository: two seeds of GRPO and of
# GSPO, one of SAPO. To train them here and now, set `LIVE = True` below, or start with
# `JAXRL_LLM_NOTEBOOKS=live`, or run `python -m experiments.notebooks 03 --live`. A run takes four
# to six minutes on an idle laptop with two cores, and all five half an hour. Runs that have
# finished are not run again.

# %%
import os

from experiments.notebooks import run_pictures as show

LIVE = os.environ.get("JAXRL_LLM_NOTEBOOKS") == "live"
RUNS = {"grpo": [0, 1], "gspo": [0, 1], "sapo": [0]}

# %% [markdown]
# ## The job
#
# Problems such as `7+8-5` are to be worked in steps: `7+8=15`, `15-5=10`, `#10`. A transformer of
# 0.8M parameters first imitates a careless teacher, who gets each step wrong with probability 1/3,
# so that a perfect imitator is right on 47 % of these problems. Then RL takes over: 64 problems × 8
# responses a step, reward 1 for the right final answer and 0 otherwise, advantages within each
# group, four updates for each rollout batch, 40 steps. The policy is not shown a right working
# again; it has to find out which of its own are.

# %%
workdirs = show.trained(RUNS, live=LIVE)
show.differences(workdirs)

# %% [markdown]
# These are all the settings in which the three differ. GSPO's band is the paper's widened
# twentyfold, since a ratio normalised by length spreads as $1/\sqrt T$ and responses here have 17
# tokens, not thousands ([lecture 1](01_objectives.ipynb), figure 1). GRPO has its paper's KL
# penalty, by default.

# %% [markdown]
# ## Say it before you look
#
# Write down what you expect before you draw a curve; afterwards everything looks as if one had
# known it. From lecture 1:
#
# 1. **Accuracy**: no difference that could be measured. The policy moves little in four updates,
#    where all three gates are close to 1.
# 2. **Clipping**: GSPO silences many more tokens than GRPO, by one or two orders of magnitude (its
#    paper: 15 % against 0.13 %).
# 3. **SAPO's gate** stays above 0.99 on average: at its temperatures it acts on outliers, and there
#    are few.

# %%
show.compare(workdirs, ["accuracy", "reward", "entropy"])

# %% [markdown]
# **Figure 1. Learning.** Thick lines are means over the seeds, thin ones the seeds. What to see:
# the three methods lie on each other, and two seeds of one method do not. A seed decides the
# weights at the start, the order of the problems and every sample; it matters far more here than
# the objective. SAPO's line is seed 0 alone, the worse one for the other two as well.

# %%
show.outcome(workdirs)

# %% [markdown]
# Accuracy is avg@4 on 256 held-out problems. How much of a difference is noise of the evaluation
# alone? Were all 1,024 samples independent, half a 95 % interval would be, in points:

# %%
f"{show.evaluation_noise(256, 4, 0.94):.1f}"

# %% [markdown]
# And the four samples of a problem are *not* independent: a hard problem is hard four times. The
# intervals in the metrics are bootstraps over problems and a little wider. Then come the seeds,
# which move the end by points where the methods move it by tenths. Had one run GRPO with one seed
# and GSPO with the other, there would be a paper in it. Runs are *paired* for that reason: the
# column "against `grpo`" compares methods within a seed. The column of means would mislead: SAPO's
# is of seed 0 alone. And two seeds bound nothing: a difference of a point is invisible here,
# whichever way it points. Wall times say even less: these runs shared their machine with other
# work, so compare tokens.

# %%
show.compare(workdirs, ["clip", "kl", "gradient", "ratio", "sequence_ratio", "no_signal"])

# %% [markdown]
# **Figure 2. What the updates did**, means over the four updates of a step. What to see: *(a)* GSPO
# clips up to a quarter of the tokens, GRPO less than 1 %: a factor of thirty, where GSPO's paper
# has a hundred, in a model tens of thousands of times larger. SAPO has no clip, and so no curve.
# *(b)* All move about as far from the policy that sampled. *(d, e)* The 99th percentile of the
# token ratio stays below 1.1, and that of the sequence ratio is smaller again. *(f)* As the policy
# gets better, more groups are all right and teach nothing: the signal runs dry before the steps do.
# Dynamic sampling (DAPO) answers that.

# %%
show.compare(workdirs, ["gate_pos", "gate_neg", "length"])

# %% [markdown]
# **Figure 3. SAPO's gates, and the lengths.** What to see: the mean gate is within a fraction of a
# percent of 1. On this job SAPO is importance sampling without a clip, and it does no harm: with
# ratios this close to 1 there is nothing to guard against. Lengths *(c)* stay at the 17 tokens that
# the task needs; nothing here could show GSPO's shrinking responses or GRPO's growing ones.

# %% [markdown]
# ## What we may conclude
#
# * Expectation 1 holds within what two seeds can show (one, for SAPO), and 2 and 3 hold clearly.
#   Mechanisms are visible at toy scale; advantages are not.
# * **GSPO silences many more tokens and learns as fast.** Silent tokens are not lost signal one for
#   one: what is clipped has already moved where it should.
# * **Nothing was unstable.** The papers' case against GRPO is about mixtures of experts, long
#   responses and thousands of steps, and none of these is here. "No difference found" is a
#   statement about this job. To test a claim about stability one must bring the method near to
#   where it breaks: stale data, high rates, many updates per rollout batch. That is what [the
#   ablations](../README.md) are for.
#
# The same comparison as a page that opens in a browser, with every metric, every seed, and axes in
# steps, tokens or seconds:

# %%
show.write_page(workdirs)

# %% [markdown]
# ## Exercises
#
# 1. Give SAPO its second seed, and all three seeds 2 to 4 (`RUNS`, live). How wide is the 95 %
#    interval of the paired difference now? How many seeds would show one point?
# 2. Make the data staler: `--config.learner.updates_per_rollout=16`. Which expectation fails first,
#    and for which method?
# 3. Train GSPO with its paper's band
#    (`--config.objective.clip_low=3e-4 --config.objective.clip_high=4e-4`). Predict its clip
#    fraction from lecture 1's figure 5, then look.
# 4. Give SAPO a temperature at which its gate is ½ at $r = 1.2$. (8.8: solve
#    $\mathrm{sech}^2(\tau \cdot 0.1) = 1/2$.) Does it now behave like GRPO?
# 5. Take GRPO's KL penalty away (`--config.objective.kl_coef=0`). Which of the curves above change?
#
# ## Papers
#
# GRPO [2402.03300](https://arxiv.org/abs/2402.03300) · GSPO
# [2507.18071](https://arxiv.org/abs/2507.18071) · SAPO
# [2511.20347](https://arxiv.org/abs/2511.20347) · DAPO
# [2503.14476](https://arxiv.org/abs/2503.14476) · on how seeds deceive: *Deep reinforcement
# learning at the edge of the statistical precipice*,
# [2108.13264](https://arxiv.org/abs/2108.13264).
#
# Next: [mixtures of experts and routing replay](04_moe_routing_replay.ipynb).
