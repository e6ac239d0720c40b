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
# # 7. One collapse, from the warning to the culprit
#
# [Lecture 2](02_read_a_run.ipynb) showed how to see *that* a run is in trouble. This one asks
# *why*: which step, which prompt, which response, which line of code. To try again is expensive
# if a run has collapsed after a week. Here five commands are enough, because a step of a run can be
# repeated exactly: [a step in a box](../../docs/runs.md#a-step-in-a-box),
# [who did it](../../docs/runs.md#who-did-it), [branches](../../docs/runs.md#branch-a-run) and
# [where two runs part](../../docs/differences.md).
#
# The cells run the commands themselves and take a few minutes in all. On another processor the
# numbers differ, so the text names few of them: read them in the outputs.

# %%
from experiments.notebooks import collapse_story as story
from experiments.notebooks import run_pictures as show

story.begin()

# %% [markdown]
# ## The run
#
# The job is the laptop's arithmetic, with Dr. GRPO
# ([2503.20783](https://arxiv.org/abs/2503.20783)): advantages are rewards minus the mean of their
# group, and are *not* divided by its standard deviation. Beside the verifier there is a second
# reward, which looks like a good idea. A wrong answer that is close should earn more than one that
# is far off: one minus the relative error. It has four lines (`experiments/notebooks/closeness.py`)
# and was tried on two responses to a problem whose answer is 13: `#13` earned 1.0, and `#12` 0.92.
# Do not look at the file yet.

# %%
story.shell(
  """python -m jaxrl_llm.main --config=configs/dr_grpo.py --workdir=runs/lecture_7/collapsed
  --config.num_steps=12 --config.rollout.num_prompts=16 --config.learner.learning_rate=5e-4
  --config.eval.every=2 --config.eval.num_prompts=32 --config.eval.batch_prompts=32
  --config.checkpoint.every=3 --config.checkpoint.keep=9 --config.log.samples_every=1
  --config.log.num_samples=128 --config.log.num_table_rows=0 --config.log.tensorboard=False
  --config.reward.terms="('experiments.notebooks.closeness:closeness=2.0',)" """,
  last=18,
)

# %% [markdown]
# ## The warning
#
# The accuracy falls. One kind of line in that output says more than the curve: *update ... of step
# ... was not finite and was skipped*. The run goes on, since one such update may be an accident,
# and would stop after ten in a row. The two [alarms](../studies/alarms/README.md) that are on by
# default are silent: the policy does not move far in any single step, and 16 steps are needed to
# know what reward is usual. So the warning names a step and an update. It does not name a cause.

# %%
collapsed = story.run_of("collapsed")
step, update = story.warning(collapsed)
print(f"step {step}, update {update}")
show.draw({"collapsed": collapsed}, ["accuracy", "kl", "gradient"])

# %% [markdown]
# **Figure 1. The collapse.** *a* Held-out accuracy with its 95 % interval, *b* divergence from the
# policy that drew, *c* norm of the gradient before clipping. What to notice: accuracy is lost from
# the first steps on, before the warning. The divergence stays below the alarm's 0.01. The norm of
# the gradient has no value where it is infinite, and looks ordinary in the steps around. Gradient
# clipping does not help: it bounds the *length* of an update, and its *direction* is still that of
# the largest part.
#
# Three suspects come to mind, and a fourth is usually forgotten:
#
# 1. the learning rate;
# 2. the objective: without a standard deviation in the advantage nothing bounds it;
# 3. the sampler, if its log-probabilities are not the learner's;
# 4. the reward.
#
# To change one after the other, and to wait for each run, is the usual way to find out. The other
# way is to ask the step.

# %% [markdown]
# ## The step
#
# The loss is a weighted sum over tokens, so the gradient of an update is *exactly* the sum of the
# gradients of its groups. The share of a group is the part of the whole gradient that comes of it,
# $\langle g_i, g \rangle / |g|^2$, and the shares add up to 1. A bundle holds all that the updates
# of a step read; the command repeats the run from the nearest checkpoint to make it. Then `blame`
# takes the update of the warning apart:

# %%
story.shell(f"python -m jaxrl_llm.cli.bundle runs/lecture_7/collapsed@{step} --out=runs/lecture_7/step.zip", last=2)
story.blame("step.zip", f"--update={update}")

# %% [markdown]
# The first row has the whole gradient; in a healthy update of four groups each has about a quarter.
# Look at its rewards, its advantages and its prompt. Then go one level down, to the responses of
# that update:

# %%
story.blame("step.zip", f"--update={update}", "--by=response", "--most=4")

# %% [markdown]
# One response has earned more than all others of the run together. `--page=step.html` would show
# every token of it in the colour of its part of the loss. Was it an accident? The accuracy fell
# before. We ask the *first* step, in which no curve looks unusual:

# %%
story.blame("collapsed@1")

# %% [markdown]
# Look for rewards above 3, which is what a right answer can earn at most, and at the shares of
# those groups. What do their prompts have in common?
#
# ## The responses
#
# All rewards of the run are in `samples.jsonl`, because the command asked for them. Sorted by the
# sign of the *right* answer they tell the rest:

# %%
story.rewards(collapsed)

# %% [markdown]
# **Figure 2. Every reward of the run**; those beyond ±25 are drawn at the edge. What to notice: in
# the first step already there are rewards far above 3 (line), and all of them belong to problems
# whose right answer is below zero (orange). The mean of a step hides them. The policy learns what
# pays, which is to be wrong, and now and then it writes digits until it is stopped.
#
# What earned most in the step of the warning, where the right answer is negative:

# %%
story.samples(collapsed, step)

# %% [markdown]
# ## The line
#
# Now look at the file. The relative error is divided by `answer`, and not by its absolute value.
# For an answer of −2 the error gets a minus sign: the further off, the better. The two cases that
# the author tried were positive. So the reward of a rare kind of prompt was inverted *and*
# unbounded, and the policy found it within two steps.
#
# The suspects look different now. The objective let it through: divided by the standard deviation
# of its group, as in GRPO ([2402.03300](https://arxiv.org/abs/2402.03300)), the advantage of one
# response among eight cannot exceed 2.7, whatever its reward. That is a property worth having, and
# it would have hidden the fault, not removed it: the sign would still be wrong.

# %% [markdown]
# ## The proof
#
# A plausible story is no proof. If the reward is the cause, then the *same responses*, graded
# rightly, must teach something else. A branch takes the exact state before the first step and
# learns from the very rollouts that the run drew in step 1 (`--recorded_steps=1`); only the reward
# differs. From step 2 on it draws its own.

# %%
story.shell(
  """python -m jaxrl_llm.main --branch=runs/lecture_7/collapsed@0 --recorded_steps=1
  --workdir=runs/lecture_7/mended
  --config.reward.terms="('experiments.notebooks.closeness:mended=2.0',)" """,
  last=12,
)

# %%
mended = story.run_of("mended")
show.draw({"collapsed": collapsed, "mended": mended}, ["accuracy", "kl", "gradient"])

# %% [markdown]
# **Figure 3. The same first responses, graded rightly.** What to notice: both begin with the same
# weights and the same tokens, and one learns while the other forgets. The rate, the objective and
# the data are unchanged, so they are not the cause.
#
# Where exactly do the two runs part? The comparison walks through the loop in its order and names
# the first difference:

# %%
story.shell("python -m jaxrl_llm.report runs/lecture_7/collapsed runs/lecture_7/mended --diff", last=12)

# %% [markdown]
# ## What to take home
#
# * A warning names a step. `blame` names a group and a response. Both are read before anything is
#   run again.
# * Look at the *extremes* of a reward, by kind of prompt, before the first step.
#   `python -m jaxrl_llm.main --config=... --pilot` grades prepared responses for this purpose.
# * A branch on recorded rollouts is the controlled experiment: one thing differs, and it is known
#   which. A new run with another seed differs in everything.
# * Normalising by the group's deviation, clipping the gradient and clipping the ratio bound the
#   damage of a wrong reward in three different ways. None of them makes it right.
#
# ## Exercises
#
# 1. Run `blame` for each update of step 1. In which would you have noticed the fault?
# 2. Take the updates of the bundle without the first group of the table, here number 13:
#    `python -m jaxrl_llm.cli.bundle runs/lecture_7/step.zip --run --drop_group=13`. What is the
#    norm of the gradient then?
# 3. Branch with `--config.objective.name=sapo` and the faulty reward. SAPO
#    ([2511.20347](https://arxiv.org/abs/2511.20347)) bounds the influence of a *ratio*. Predict
#    first what it can do against a *reward*.
# 4. Branch with `--config.advantage.normalize_std=True`. Does the run still collapse? What has it
#    learned about problems with a negative answer?
# 5. A study continued 20 collapses from their alarm with four remedies
#    ([forensics](../studies/forensics/README.md)). Which of them would have saved this run?
#
# ## Papers
#
# Dr. GRPO: [2503.20783](https://arxiv.org/abs/2503.20783). GRPO:
# [2402.03300](https://arxiv.org/abs/2402.03300). SAPO:
# [2511.20347](https://arxiv.org/abs/2511.20347). Scaling laws for reward model overoptimization:
# [2210.10760](https://arxiv.org/abs/2210.10760).
