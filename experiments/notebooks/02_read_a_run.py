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
# # 2. How to read a run
#
# A run of RL seldom fails with an error. It goes on, prints numbers, and has learnt nothing, or has
# unlearnt. This lecture reads three real runs side by side: a healthy one, and two that differ from
# it in a single number. One of them limped; the other collapsed within three steps. At the end you
# should be able to say of a run of your own, within a minute, whether it is worth its electricity.
#
# All three are the laptop job (`python -m jaxrl_llm.main --config=configs/gspo.py`, seed 0): 64
# arithmetic problems × 8 responses a step, 40 steps, GSPO. [Lecture
# 3](03_gspo_vs_grpo_vs_sapo.ipynb) says more about the job. Their logs came with the repository,
# thinned by `python -m experiments.notebooks.keep_log`.

# %%
from experiments.notebooks import run_pictures as show

healthy = show.checked_in("gspo-0")
limping = show.checked_in("limping-0")
collapsed = show.checked_in("collapsed-0")
runs = {"healthy": healthy, "limping": limping, "collapsed": collapsed}

# %% [markdown]
# ## What a run leaves behind
#
# | file in the workdir | what it holds |
# | --- | --- |
# | `metrics.jsonl` | a row for each step: the truth. Phases `warm_start`, `rl` and `eval` |
# | `samples.jsonl` | responses of some steps, word for word, with rewards, advantages and log-probabilities |
# | `summary.json` | how it ended: accuracies, tokens, seconds by phase, alarms |
# | `config.json` | every setting, as it was |
# | `report.html` | all of this as one page that opens without a network, also while the run goes on |
#
# Everything below comes from the first three. Start at the end:

# %%
show.summaries(runs)

# %% [markdown]
# Same start, nearly the same number of tokens, no skipped update, **no alarm**, status "finished".
# They ended at 94 %, 88 % and 7 %, the last a seventh of what it began with. A reader who only
# checks whether the job has ended sees three good runs; one who only looks at the final accuracy
# sees two.
#
# ## First look: is it learning?

# %%
show.draw(runs, ["accuracy", "reward", "entropy"])

# %% [markdown]
# **Figure 1. Three curves to look at first.** *a* Held-out accuracy with its 95 % interval
# (bootstrap over problems); *b* mean reward on training prompts; *c* entropy of the policy. What to
# see in the healthy run (blue): reward rises fast, then slowly, and held-out accuracy follows it,
# so what is learnt carries over to problems never trained on. Entropy falls smoothly and does not
# reach zero. In the collapsed one (green) reward falls from the third step on, and entropy *rises*:
# the policy is becoming noise. The limping one (orange) is the instructive one. It learns *faster*
# than the healthy run for four steps, loses all of it again by step 11, and then recovers while its
# learning rate decays. Its curve from step 20 on looks fine.
#
# A few rules for these three:
#
# * **Reward up, held-out accuracy flat**: the reward is being gamed, or the problems are being
#   memorised. Read samples.
# * **Entropy to zero in a few steps**: collapse onto one answer. Groups become unanimous,
#   advantages vanish, learning ends.
# * **Reward up and down again, or entropy up while reward falls**: updates destroy what they teach.
#   Most often the learning rate.

# %% [markdown]
# ## Read samples
#
# No curve replaces reading. The policy of the collapsed run before its first update (all three runs
# begin with these very responses):

# %%
show.samples(collapsed, step=1)

# %% [markdown]
# At step 10:

# %%
show.samples(collapsed, step=10)

# %% [markdown]
# At its end:

# %%
show.samples(collapsed, step=40)

# %% [markdown]
# At step 1 the policy writes its teacher's workings, slips included. At step 10 it still writes
# lines of the right *form*, but the first line often no longer copies the problem, and there are
# more lines than steps. At step 40 arithmetic is gone. The healthy run on the same problems, at its
# end:

# %%
show.samples(healthy, step=40)

# %% [markdown]
# ## Second look: what do the updates do?

# %%
show.draw(runs, ["kl", "ratio", "clip", "gradient", "length", "cut"])

# %% [markdown]
# **Figure 2. The updates.** *a* How far the four updates of a step carry the policy from the one
# that sampled, $\mathbb{E}[r - 1 - \log r]$ in nats a token. *b* The 99th percentile of the token
# ratio $r$. *c* Share of tokens that the clip silences. *d* Norm of the gradient *before* it is
# clipped to 1. *e* Mean length. *f* Share of responses cut at the budget of 32 tokens. What to see:
#
# * *a* is the curve that tells them apart **at the first step**, before any reward has changed:
#   8e-5, 1.5e-3 and 5.5e-3. A rough scale, from these three runs and no more: below 1e-3 is calm;
#   from 1e-2 on the policy that learns is another one than the policy that sampled.
# * *b* says the same in other words. In the second step of the collapsed run the largest ratio of a
#   token was 440.
# * *c* looks alarming in all: 18 % in the healthy run. A clip fraction has no good value by itself,
#   and GSPO's is high by design. A *jump* of it is news.
# * *d* hardly tells them apart. Gradients are clipped and Adam divides by their size, so their norm
#   says little about the size of a step.
# * *e, f* wander in the collapsed run: responses that run on into the budget. The limping run shows
#   nothing here.

# %%
show.metrics_of(collapsed, 2, ["actor/ppo_kl_k3", "ratio/max", "actor/pg_clipfrac", "critic/rewards/mean"])

# %% [markdown]
# The mean reward of that step was still 0.50: it belongs to responses drawn *before* the update
# that broke the policy. Reward tells you about the step before.
#
# ## Third look: is there a signal?

# %%
show.draw(runs, ["no_signal", "learning_rate"])

# %% [markdown]
# **Figure 3. Groups that teach nothing, and the one number that differs.** *a* Share of groups
# whose eight responses all have the same reward; their advantages are zero. What to see: all climb
# to 60 % and more, for opposite reasons. The healthy policy gets whole groups right, the collapsed
# one gets them wrong. The same number, read without the reward beside it, would be praise or blame.
# *b* The learning rate peaks at 2e-4, 1e-3 or 2e-3. That is all that was changed. It decays to zero
# in each, which may be what saves the limping run. The collapsed one does not come back: hardly
# anything right is left to reinforce.

# %% [markdown]
# ## Alarms
#
# A run watches itself by rules (`jaxrl_llm.run.alarms`): a loss, a gradient norm or a fall of the
# reward beyond 6 robust deviations of the last 128 steps; entropy below a tenth of its first value;
# most responses cut; nearly all groups without a signal. They can be recomputed from the metrics:

# %%
show.alarm_lines(collapsed)

# %% [markdown]
# Nothing. Why not? A rule that compares with the past needs a past, sixteen steps of it, and this
# run was lost after three. Its entropy rose, its responses fitted the budget, and 89 % of the
# groups were silent at most, where the limit is 95 %. Alarms are for the run that was fine for a
# week. For the first minutes nothing replaces eyes. A stricter limit would have said something:

# %%
show.alarm_lines(collapsed, no_signal_above=0.6)

# %% [markdown]
# But the same limit also goes off in the healthy run, where silence means success:

# %%
show.alarm_lines(healthy, no_signal_above=0.6)

# %% [markdown]
# ## Where the time goes

# %%
show.where_time_went(runs)

# %% [markdown]
# **Figure 4. Seconds by phase.** What to see: in this job, on a CPU, the warm start and the updates
# cost most and sampling little. Scoring is next to nothing, since the sampler's own
# log-probabilities serve as the old ones. These runs shared their machine with other work, so the
# bars cannot be compared with each other. When a run is slower than it should be, look at
# `perf/recompiles` first, then at `perf/packing_waste`, then at the widest part here.

# %% [markdown]
# ## The minute, in order
#
# 1. `eval/accuracy` with its interval, and `critic/rewards/mean`: up, and without a dent?
# 2. `actor/ppo_kl_k3`, from the *first* step: below 1e-3?
# 3. `actor/entropy`: falling slowly?
# 4. `response_length/mean` and `response_length/clip_ratio`: steady?
# 5. `group/frac_reward_zero_std`, beside the reward: is there something left to learn from?
# 6. Five samples. Always.
#
# ## Exercises
#
# 1. From the three `metrics.jsonl` alone, find the first row in which the runs differ. Which metric
#    differs most, in units of its own size?
# 2. Write down a rule on `actor/ppo_kl_k3` that stops the collapsed run at step 2 and would never
#    have stopped the healthy one. Would it stop the limping one, and should it? How would you
#    choose its limit for a new job?
# 3. Is there a rate between 2e-4 and 1e-3 that learns faster than the healthy run, without a dent?
#    Look for it (`--config.learner.learning_rate=...`), and see whether panel *a* of figure 2
#    foretells it.
# 4. Why does the *warm start* bear a rate of 3e-3 (`--config.warm_start.learning_rate`) where RL
#    falls apart at 2e-3?
# 5. Make your own: `python -m jaxrl_llm.main --config=configs/gspo.py:tiny` takes under a minute.
#    Read it here with `show.read(pathlib.Path("WORKDIR"))`.
#
# ## Papers
#
# The estimate $r - 1 - \log r$: J. Schulman, *Approximating KL divergence*, 2020; as a penalty in
# GRPO, [2402.03300](https://arxiv.org/abs/2402.03300). Entropy collapse and groups without a
# signal: DAPO, [2503.14476](https://arxiv.org/abs/2503.14476). The share of clipped tokens under
# GSPO: [2507.18071](https://arxiv.org/abs/2507.18071). Ratios before a collapse:
# [2510.11370](https://arxiv.org/abs/2510.11370).
#
# Next: [GSPO against GRPO against SAPO](03_gspo_vs_grpo_vs_sapo.ipynb).
