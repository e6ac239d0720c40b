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
# # 7. One collapse, from the alarm to the culprit
#
# [Lecture 2](02_read_a_run.ipynb) showed how to see *that* a run is in trouble. This one asks *why*:
# which step, which prompt, which response, which line of code. A run that dies after a week leaves
# a question that is expensive to answer by trying again. Here it takes five commands, because a
# step of a run can be repeated exactly: [a step in a box](../../docs/runs.md#a-step-in-a-box),
# [who did it](../../docs/runs.md#who-did-it), [branches](../../docs/runs.md#branch-a-run) and
# [where two runs part](../../docs/differences.md).
#
# The cells run the commands themselves, on the processor, and take a few minutes in all. The
# numbers in the text below would not survive another machine, so the text names none: read them in
# the outputs.

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
# is far off: one minus the relative error. Somebody has written it in four lines
# (`experiments/notebooks/closeness.py`), tried it on `#13` against 13 and on `#12`, and found 1.0
# and 0.92. Do not look at the file yet.

# %%
story.shell(
  """python -m jaxrl_llm.main --config=configs/dr_grpo.py --workdir=runs/lecture_7/collapsed
  --config.num_steps=10 --config.rollout.num_prompts=16 --config.learner.learning_rate=8e-4
  --config.eval.every=2 --config.eval.num_prompts=32 --config.eval.batch_prompts=32
  --config.checkpoint.every=3 --config.checkpoint.keep=9 --config.log.samples_every=1
  --config.log.num_samples=128 --config.log.num_table_rows=0 --config.log.tensorboard=False
  --config.reward.terms="('experiments.notebooks.closeness:closeness=2.0',)" """,
  last=16,
)

# %% [markdown]
# ## The alarm
#
# One line of that output is worth more than the rest: `alarm policy_kl`. It says that the policy
# has moved further from the one that drew the responses, in a single step, than healthy runs do.
# [A study](../studies/alarms/README.md) of 61 collapses found this alarm to be the best warning.
# It names a step, not a cause.

# %%
collapsed = story.run_of("collapsed")
print("\n".join(show.alarm_lines(collapsed)))
show.draw({"collapsed": collapsed}, ["accuracy", "kl", "gradient"])

# %% [markdown]
# **Figure 1. The collapse.** *a* Held-out accuracy, *b* divergence from the policy that drew,
# *c* norm of the gradient before clipping. What to notice: accuracy is lost within few steps, and
# the norm of the gradient leaves the scale at the step of the alarm. A missing point is a gradient
# that was not finite; such an update is skipped. Gradient clipping does not help: it bounds the
# *length* of an update, and leaves its *direction* to whoever is loudest.
#
# Three suspects come to mind, and a fourth is usually forgotten:
#
# 1. the learning rate, which is above the job's default;
# 2. the objective: without a standard deviation in the advantage nothing bounds it;
# 3. the sampler, if its log-probabilities are not the learner's;
# 4. the reward.
#
# Changing one after the other, and waiting for each run, is the usual way to find out. The other
# way is to ask the step.

# %% [markdown]
# ## The step
#
# The loss is a weighted sum over tokens, so the gradient of an update is *exactly* the sum of the
# gradients of its groups. The share of a group is the part of the whole gradient that comes of it,
# $\langle g_i, g \rangle / |g|^2$, and the shares add up to 1. `blame` repeats the step from the
# nearest checkpoint and prints them. We ask for the step of the alarm:

# %%
story.shell("python -m jaxrl_llm.cli.blame runs/lecture_7/collapsed@4 --most=4")

# %% [markdown]
# The first row is the culprit's address. In a healthy step of four groups each has about a quarter.
# Look at its rewards, its advantages and its prompt. Then go one level down, to the responses of
# that group. The box is made once, so that the step need not be repeated for every question:

# %%
story.shell("python -m jaxrl_llm.cli.bundle runs/lecture_7/collapsed@4 --out=runs/lecture_7/step4.zip", last=2)
story.shell("python -m jaxrl_llm.cli.blame runs/lecture_7/step4.zip --by=response --most=5")

# %% [markdown]
# ## The responses
#
# All rewards of the run are in `samples.jsonl`, because the command asked for them. Sorted by the
# sign of the *right* answer they tell the rest:

# %%
story.rewards(collapsed)

# %% [markdown]
# **Figure 2. Every reward of the run**, on an axis that is linear within ±10 and logarithmic
# outside. What to notice: in the first step already, rewards far above 3 are there, which is what a
# right answer can earn at most; nearly all belong to problems whose right answer is below zero
# (orange). Nothing was wrong with the mean. In the following steps the policy learns what pays, and
# from some step on it writes digits until it is stopped.
#
# What it writes:

# %%
show.samples(collapsed, 6, count=4)

# %% [markdown]
# ## The line
#
# Now look at the file. The relative error is divided by `answer`, and not by its absolute value.
# For an answer of −2 the error gets a minus sign: the further off, the better. The two cases that
# the author tried were positive. So the reward of a rare kind of prompt was inverted *and*
# unbounded, and the policy found it within three updates.
#
# The suspects look different now. The learning rate made it fast. The objective let it through:
# divided by the standard deviation of its group, as in GRPO
# ([2402.03300](https://arxiv.org/abs/2402.03300)), the advantage of one response among eight cannot
# exceed 2.5, whatever its reward. That is a property worth having, and it would have hidden the
# fault, not removed it: the sign would still be wrong.

# %% [markdown]
# ## The proof
#
# A plausible story is no proof. If the reward is the cause, then the *same responses*, graded
# rightly, must not move the policy that far. A branch takes the exact state after step 3 and learns
# from the very rollouts that the run drew in step 4 (`--recorded_steps=1`); only the reward differs.
# From step 5 on it draws its own.

# %%
story.shell(
  """python -m jaxrl_llm.main --branch=runs/lecture_7/collapsed@3 --workdir=runs/lecture_7/mended --recorded_steps=1
  --config.reward.terms="('experiments.notebooks.closeness:mended=2.0',)" """,
  last=12,
)

# %%
mended = story.run_of("mended")
show.draw({"collapsed": collapsed, "mended": mended}, ["accuracy", "kl", "gradient"])

# %% [markdown]
# **Figure 3. The same responses, graded rightly.** Both curves are one until step 3. What to
# notice: in step 4 the two runs learn from the same tokens, and the gradient of the mended one
# stays where it was. The rate, the objective and the data are unchanged, so they are not the cause.
# Its accuracy recovers or at least holds; with this rate and 16 prompts per step it is noisy.
#
# Where exactly do the two runs part? The comparison walks through the loop in its order and names
# the first difference:

# %%
story.shell("python -m jaxrl_llm.report runs/lecture_7/collapsed runs/lecture_7/mended --diff", last=12)

# %% [markdown]
# ## What to take home
#
# * An alarm names a step. `blame` names a group and a response. Both are read before anything is
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
# 1. Run `blame` for step 1 with `--order=share`. Would you have noticed?
# 2. Take the update of step 4 without the first group of the table:
#    `python -m jaxrl_llm.cli.bundle runs/lecture_7/step4.zip --run --drop_group=N`. What is the norm
#    of the gradient then?
# 3. Branch with `--config.objective.name=sapo` and the faulty reward. SAPO
#    ([2511.20347](https://arxiv.org/abs/2511.20347)) bounds the influence of a *ratio*. Predict
#    first what it can do against a *reward*.
# 4. Branch with `--config.advantage.normalize_std=True`. Does the run still collapse? What has it
#    learned about problems with a negative answer?
# 5. A study continued ten collapses from their alarm with four remedies
#    ([forensics](../studies/forensics/README.md)). Which of them would have saved this run?
#
# ## Papers
#
# Dr. GRPO: [2503.20783](https://arxiv.org/abs/2503.20783). GRPO:
# [2402.03300](https://arxiv.org/abs/2402.03300). SAPO:
# [2511.20347](https://arxiv.org/abs/2511.20347). Scaling laws for reward model overoptimization:
# [2210.10760](https://arxiv.org/abs/2210.10760).
