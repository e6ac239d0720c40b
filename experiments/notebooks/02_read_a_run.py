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
# An RL run seldom fails with an error. It keeps running and printing numbers while it has learned
# nothing, or is losing what it had learned. This lecture reads three real runs side by side: a
# healthy one, and two that differ from it in a single number. One of those limped; the other
# collapsed within three steps. By the end you should be able to tell within a minute whether a run
# of your own is worth its electricity.
#
# All three are the laptop job (`python -m jaxrl_llm.main --config=configs/gspo.py`, seed 0): 64
# arithmetic problems × 8 responses per step, 40 steps, GSPO. [Lecture
# 3](03_gspo_vs_grpo_vs_sapo.ipynb) describes the job in more detail. Their logs come with the
# repository, thinned by `python -m experiments.notebooks.keep_log`.

# %%
from experiments.notebooks import run_pictures as show

healthy = show.checked_in("gspo-0")
limping = show.checked_in("limping-0")
collapsed = show.checked_in("collapsed-0")
runs = {"healthy": healthy, "limping": limping, "collapsed": collapsed}

# %% [markdown]
# ## What a run leaves behind
#
# | file in the workdir | contents |
# | --- | --- |
# | `metrics.jsonl` | one row per step, the primary record; phases `warm_start`, `rl` and `eval` |
# | `samples.jsonl` | responses of some steps, verbatim, with rewards, advantages and log-probabilities |
# | `summary.json` | the outcome: accuracies, tokens, seconds by phase, alarms |
# | `config.json` | every setting of the run |
# | `report.html` | all of the above as one page that opens without a network, also during the run |
#
# Everything below comes from the first three files. Start with the outcome:

# %%
show.summaries(runs)

# %% [markdown]
# All three have the same start, nearly the same number of tokens, no skipped update, **no alarm**
# and status "finished". They ended at 94 %, 88 % and 7 %; the last is a seventh of its initial
# accuracy. A reader who only checks whether the job has ended sees three good runs; one who only
# looks at the final accuracy sees two.
#
# ## First look: is it learning?

# %%
show.draw(runs, ["accuracy", "reward", "entropy"])

# %% [markdown]
# **Figure 1. The first three curves to look at.** *a* Held-out accuracy with its 95 % interval
# (bootstrap over problems); *b* mean reward on training prompts; *c* entropy of the policy. What to
# notice: in the healthy run (blue) the reward rises fast and then slowly, and held-out accuracy
# follows it, so what the policy learns carries over to problems that it was never trained on. Its
# entropy falls smoothly and does not reach zero. In the collapsed run (green) the reward falls from
# the third step on, and the entropy *rises*: the policy is turning into noise. The limping run
# (orange) is the instructive one. It learns *faster* than the healthy run for four steps, loses all
# of it again by step 11, and then recovers while its learning rate decays. From step 20 on its
# curve looks fine.
#
# Some rules of thumb for these three curves:
#
# * **Reward up, held-out accuracy flat**: the policy is gaming the reward or memorising the
#   problems. Read samples.
# * **Entropy to zero in a few steps**: the policy has collapsed onto one answer. Groups become
#   unanimous, advantages vanish, and learning ends.
# * **Reward up and down again, or entropy up while the reward falls**: the updates destroy what
#   they teach. The usual cause is the learning rate.

# %% [markdown]
# ## Read samples
#
# No curve replaces reading samples. First, the policy of the collapsed run before its first update
# (all three runs begin with exactly these responses):

# %%
show.samples(collapsed, step=1)

# %% [markdown]
# At step 10:

# %%
show.samples(collapsed, step=10)

# %% [markdown]
# At the end of the run:

# %%
show.samples(collapsed, step=40)

# %% [markdown]
# At step 1 the policy reproduces its teacher's workings, including the mistakes. At step 10 it
# still writes lines of the right *form*, but the first line often no longer copies the problem, and
# there are more lines than steps. At step 40 the arithmetic is gone. For comparison, the healthy
# run on the same problems, at the end of the run:

# %%
show.samples(healthy, step=40)

# %% [markdown]
# ## Second look: what do the updates do?

# %%
show.draw(runs, ["kl", "ratio", "clip", "gradient", "length", "cut"])

# %% [markdown]
# **Figure 2. The updates.** *a* How far the four updates of a step move the policy away from the
# one that sampled, $\mathbb{E}[r - 1 - \log r]$ in nats per token. *b* The 99th percentile of the
# token ratio $r$. *c* The share of tokens that the clip silences. *d* The norm of the gradient
# *before* it is clipped to 1. *e* The mean response length. *f* The share of responses cut at the
# budget of 32 tokens. What to notice:
#
# * *a* is the curve that separates the runs **at the first step**, before any reward has changed:
#   8e-5, 1.5e-3 and 5.5e-3. A rough scale, based on these three runs only: values below 1e-3 are
#   calm, and from 1e-2 on the policy being trained is no longer the policy that sampled.
# * *b* shows the same from another angle. In the second step of the collapsed run the largest token
#   ratio was 440.
# * *c* looks alarming in all three runs: it reaches 18 % even in the healthy one. No value of the
#   clip fraction is good in itself, and GSPO's is high by design. A *jump* in it is worth a look.
# * *d* hardly separates the runs. Gradients are clipped and Adam divides by their size, so their
#   norm says little about the size of a step.
# * *e* and *f* wander in the collapsed run, as responses run on into the budget. In the limping run
#   they show nothing.

# %%
show.metrics_of(collapsed, 2, ["actor/ppo_kl_k3", "ratio/max", "actor/pg_clipfrac", "critic/rewards/mean"])

# %% [markdown]
# The mean reward of that step was still 0.50, because it belongs to responses drawn *before* the
# update that broke the policy. The reward of a step reflects the updates of the step before.
#
# ## Third look: is there a signal?

# %%
show.draw(runs, ["no_signal", "learning_rate"])

# %% [markdown]
# **Figure 3. Groups that teach nothing, and the one setting that differs.** *a* The share of groups
# whose eight responses all have the same reward, so that their advantages are zero. What to notice:
# all three climb to 60 % and more, for opposite reasons. The healthy policy gets whole groups
# right, and the collapsed one gets them wrong. Read without the reward beside it, the same number
# could mean success or failure. *b* The learning rate peaks at 2e-4, 1e-3 or 2e-3; nothing else was
# changed. It decays to zero in each run, which may be what saves the limping one. The collapsed run
# does not recover: it produces hardly any correct response that could be reinforced.

# %% [markdown]
# ## Alarms
#
# Every run checks itself against rules (`run.observe.alarms`): a divergence from the old policy
# above 0.01 nats per token, and a fall of the reward beyond 3 robust deviations of the last 128
# steps. Further rules are off by default, since they do not tell collapses from healthy runs. The
# alarms of this run, which had ended before the first of the two rules existed, can be recomputed
# from the metrics:

# %%
show.alarm_lines(collapsed)

# %% [markdown]
# The alarm comes at step 2: one step after panel *a* of figure 2 separates the runs, and one before
# the reward falls. That fall raises no alarm: a rule that compares with the past needs sixteen
# steps of it, and this run was lost after three. [A study](../studies/alarms/README.md) measured
# how often each rule warns, and how often in vain. A limit on silent groups, which is off by
# default, would have raised an alarm as well:

# %%
show.alarm_lines(collapsed, no_signal_above=0.6)

# %% [markdown]
# The same limit, however, also raises an alarm in the healthy run, where silent groups mean
# success:

# %%
show.alarm_lines(healthy, no_signal_above=0.6)

# %% [markdown]
# ## Where the time goes

# %%
show.where_time_went(runs)

# %% [markdown]
# **Figure 4. Seconds by phase.** What to notice: in this job, on a CPU, the warm start and the
# updates cost most, and sampling costs little. Scoring is almost free, since the sampler's own
# log-probabilities serve as the old ones. These runs shared their machine with other work, so the
# bars cannot be compared with each other. When a run is slower than it should be, look at
# `perf/recompiles` first, then at `perf/packing_waste`, and then at the widest segment here.

# %% [markdown]
# ## The one-minute check, in order
#
# 1. `eval/accuracy` with its interval, and `critic/rewards/mean`: are they rising, without a dent?
# 2. `actor/ppo_kl_k3`, from the *first* step: is it below 1e-3?
# 3. `actor/entropy`: is it falling slowly?
# 4. `response_length/mean` and `response_length/clip_ratio`: are they steady?
# 5. `group/frac_reward_zero_std`, beside the reward: is there still something left to learn from?
# 6. Five samples. Always.
#
# ## Exercises
#
# 1. From the three `metrics.jsonl` alone, find the first row in which the runs differ. Which metric
#    differs most, relative to its own size?
# 2. Write down a rule on `actor/ppo_kl_k3` that stops the collapsed run at step 2 and would never
#    have stopped the healthy one. Would it stop the limping one, and should it? How would you
#    choose its limit for a new job?
# 3. Is there a learning rate between 2e-4 and 1e-3 that learns faster than the healthy run, without
#    a dent? Look for it (`--config.learner.learning_rate=...`), and check whether panel *a* of
#    figure 2 predicts it.
# 4. Why does the *warm start* tolerate a learning rate of 3e-3
#    (`--config.warm_start.learning_rate`) when RL breaks down at 2e-3?
# 5. Make a run of your own: `python -m jaxrl_llm.main --config=configs/gspo.py:tiny` takes less
#    than a minute. Read it here with `show.read(pathlib.Path("WORKDIR"))`.
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
