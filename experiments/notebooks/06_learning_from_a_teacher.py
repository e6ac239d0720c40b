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
# # 6. Learning from a teacher
#
# A reward says once per response whether it was right. A teacher, a second model with the same
# tokenizer, says at *every* token which continuations it finds likely. This lecture asks what a
# student learns from either, and from both: first on distributions that can be drawn, then in runs
# of the laptop job.

# %%

from experiments.notebooks import teacher_pictures as lecture

# %% [markdown]
# ## Which divergence?
#
# The student draws its own responses (*on-policy* distillation), and at each of its states
# $s = (x, y_{<t})$ the two distributions over the vocabulary are compared:
#
# $$\mathrm{KL}(\pi_T \Vert \pi) \;(\beta = 0), \qquad \mathrm{KL}(\pi \Vert \pi_T) \;(\beta = 1), \qquad
# \beta\, \mathrm{KL}(\pi_T \Vert m) + (1-\beta)\, \mathrm{KL}(\pi \Vert m), \quad
# m = \beta \pi_T + (1-\beta)\pi.$$
#
# They have the same minimum, $\pi = \pi_T$. They differ where the student cannot get there. Here
# the teacher has two answers, and the student has room for one hump only:

# %%
lecture.preferences([0.0, 0.5, 1.0])

# %% [markdown]
# **Figure 1. What each divergence prefers.** What to notice: the forward divergence (β = 0) pays
# for every answer of the teacher that the student does not have, so the hump covers both and is
# highest between them, where the teacher says nothing. The reverse divergence (β = 1) pays for what
# the student says and the teacher does not, so the hump sits on one answer, and so does the one in
# the middle (β = 0.5; the best of three descents, because one that starts between the humps stays
# there). A policy that is sampled from wants that: half an answer is none.

# %% [markdown]
# ## Exact, or sampled?
#
# A trainer whose teacher is a remote server gets one number per token, the log-probability of the
# token that was drawn. $\log \pi_T(y_t) - \log \pi(y_t)$ is an unbiased estimate of the negative
# reverse KL, and serves as an advantage per token: this is `config.teacher.opd_coef`. If the
# teacher runs in the same program, the whole sum over the vocabulary is there:
# `config.teacher.gkd_coef`. How much is lost by sampling? For two random policies over 264 ids:

# %%
lecture.noise([1, 10, 100, 1000])

# %% [markdown]
# A single sample is mostly noise, and even a hundred are off by nearly as much as the signal. A
# training batch has thousands of tokens, but their states differ, so each of them is one draw.

# %% [markdown]
# ## From rewards, from a teacher, from both
#
# Four runs of the laptop job begin with a warm-started policy, which is right on 49 % of the
# problems (44 % in the last run, whose seed is 1 instead of 0). The first run is GSPO, which reads
# rewards. At its end it is the teacher of the others, which are `configs/opd.py:exact` (β = 0.5),
# `configs/opd.py` and `configs/opd.py:mixed`: the whole distribution, the sampled token, and the
# sampled token beside the reward.

# %%
runs = lecture.runs({
  "rewards": "opd-teacher-0", "teacher, exact": "opd-exact-0", "teacher, sampled": "opd-sampled-0", "both": "opd-mixed-1",
})
lecture.curves(runs)

# %% [markdown]
# **Figure 2. The same policy, four sources.** What to notice: *(a)* by the number of tokens that
# the student generates, a teacher is several times as fast as rewards, and the exact divergence is
# faster than its sampled form. *(b)* All that learn from the teacher approach it. *(c)* Entropy
# falls in all of them: the teacher is a sharper policy than the student.

# %%
lecture.reached(runs, budget=35_000)

# %% [markdown]
# ## What we can conclude
#
# * **A teacher replaces search, not knowledge.** It had to be trained by rewards first, on ten
#   times as many tokens (its own 345 thousand). Distillation pays if one teacher serves many
#   students, or if the student is smaller.
# * **More problems beat more samples.** No advantage compares the samples of a problem here, so the
#   two runs with a teacher alone draw one sample of each of 128 problems. The run with both needs
#   groups, 16 problems with 8 samples each, and pays for them.
# * **This is one seed of each, on a tiny task.** The [log](../log/distillation.md) has the others,
#   what did not work, and the rules that were written before the runs.
#
# ## Exercises
#
# 1. Fit the student of figure 1 with smaller and smaller β. Where does it change sides?
# 2. The error of one sample is above 1. Why does a policy that follows such a gradient learn at
#    all? (Average it over a batch; then think of Adam.)
# 3. Train `configs/opd.py:exact` with `--config.teacher.gkd_beta=0` and `=1`. Predict the entropy
#    of either first.
# 4. Let the student have an eighth of the teacher's parameters
#    (`--config.model.preset=nano`). Which divergence is better now?
# 5. `config.teacher.path="self"` makes the policy its own teacher, behind a prompt that holds the
#    solution. What is the best that it can learn?
#
# ## Papers
#
# On-policy distillation of language models (GKD)
# [2306.13649](https://arxiv.org/abs/2306.13649) · MiniLLM
# [2306.08543](https://arxiv.org/abs/2306.08543) · *On-policy distillation*, Thinking Machines Lab,
# 2025 · Qwen3 [2505.09388](https://arxiv.org/abs/2505.09388), whose small models learn so.
