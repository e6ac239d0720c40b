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
# # 4. Mixtures of experts, drifting routes, and how to replay them
#
# In a mixture of experts, a small *router* sends each token to a few of many sub-networks. That
# choice is discrete: a tiny change of the weights, or of the arithmetic, can send a token to other
# experts. Importance ratios compare two policies token by token, so when the routes differ they
# compare two different networks. This lecture shows how routes drift on a model that trains here in
# seconds, then what R2 and R3 do about it, and finally what a larger measurement found, which is
# not what one would hope for.

# %%
from experiments.notebooks import small_mixture as mixture

# %% [markdown]
# ## The router
#
# For a token with state $x$, the router gives each of $E$ experts a score $h = W x$, keeps the best
# $K$, and mixes their outputs:
#
# $$\mathcal T = \mathrm{top}_K(h), \qquad g_i = \frac{e^{h_i}}{\sum_{j \in \mathcal T} e^{h_j}} \;\; (i \in \mathcal T), \qquad
# y = \sum_{i \in \mathcal T} g_i\, E_i(x).$$
#
# The gates $g$ are smooth in the weights, and gradients flow through them. The set $\mathcal T$ is
# not smooth: where the $K$-th score and the next one are close, an update of $10^{-3}$ may swap
# them, and $y$ jumps.
#
# Three policies meet in one training step, each with its own routes:
#
# $$\frac{\pi_\theta(y_t)}{\mu(y_t)} \;=\;
# \underbrace{\frac{\pi_\mathrm{old}(y_t \mid \text{routes of the learner})}
# {\mu(y_t \mid \text{routes of the sampler})}}_{\text{mismatch}} \;\times\;
# \underbrace{\frac{\pi_\theta(y_t \mid \text{new routes})}
# {\pi_\mathrm{old}(y_t \mid \text{old routes})}}_{\text{staleness, } r_t}.$$
#
# The first factor exists because the sampler $\mu$ computes in lower precision or in a different
# order than the learner, with the *same* weights. The second factor exists because the learner
# makes several updates on one rollout batch.

# %% [markdown]
# ## A small mixture
#
# The model has two layers of 8 experts, and each token visits 2 of them. It imitates a teacher of
# arithmetic for 60 steps, until it writes workings such as `7+8=15⏎15-5=10⏎#10`. Then a sampler in
# bfloat16 draws 32 responses, and the learner, in float32, makes four updates of GRPO on them. All
# of this is trained here and now; most of the time goes into compilation.

# %%
bed, params = mixture.warm_mixture()
stale = mixture.go_stale(bed, params, updates=4, learning_rate=1e-3)

# %%
mixture.route_map(stale)

# %% [markdown]
# **Figure 1. Experts of one response, before and after four updates.** A column is a token, and a
# mark is an expert that it visits. What to notice: most routes stay (blue). Changes come in pairs,
# one expert dropped (orange) and one added (green). Both layers change. In the second there are two
# reasons: its own router has moved, and so has its input, which the first layer produces.

# %% [markdown]
# ## Mismatch: the same weights, another precision
#
# The table compares the learner's passes over the sampler's tokens before any update: with live
# routing, with the learner's own routes replayed, and with the sampler's routes replayed. The
# divergence is the k3 estimate of $\mathrm{KL}(\mu \Vert \pi_\mathrm{old})$, the mean of
# $k - 1 - \log k$ with $k = \pi_\mathrm{old} / \mu$.

# %%
mixture.sampler_table(stale)

# %% [markdown]
# Only a few tokens in a thousand are sent to other experts, and yet they carry most of the
# divergence: with the sampler's routes the KL falls several times over. The remainder is bfloat16's
# rounding. (The training amplifies rounding, so another machine has other numbers, and other
# responses, in this table and the next.) Replaying the learner's own routes must leave every bit
# unchanged, and it does:

# %%
mixture.replay_is_exact(stale)

# %% [markdown]
# ## R2 and R3
#
# **Routing replay** records the experts that a token visited and forces the same choice later. Only
# the *set* $\mathcal T$ is replayed. The gates $g$ are computed from the live scores of the experts
# in the set, so the router continues to learn:
#
# $$g_i = \frac{I_i\, e^{h_i^{\theta}}}{\sum_j I_j\, e^{h_j^{\theta}}}, \qquad I = \text{the recorded choice}.$$
#
# | | routes replayed | passes | effect removed |
# | --- | --- | --- | --- |
# | **R2** | the learner's own, at $\pi_\mathrm{old}$ | all updates of a rollout batch | the part of staleness due to routes |
# | **R3** | the sampler's | $\pi_\mathrm{old}$ and all updates | the parts of mismatch and staleness due to routes |
#
# R2 changes nothing in the first update. From the second update on, it optimises a policy that
# routes as the old one did, which is not the policy that will be sampled from next. R3 has that
# bias from the first update on. In a config, replay is one field: `config.moe.replay = "R2"` or
# `"R3"`.
#
# The table below shows the same four updates with and without replay:

# %%
mixture.ratio_table(stale)

# %% [markdown]
# With live routing, between one activated expert in ten and one in twenty differs after four
# updates. With replay none does, by construction. But the *spread of the ratios* hardly shrinks,
# and the largest ratio does not shrink at all. To see why, compare the tokens whose experts changed
# with all others:

# %%
mixture.gate_drift(stale)

# %% [markdown]
# **Figure 2. The effect of a changed route on a token.** Change of $\log \pi$ over the four
# updates; each dot is a token, and bars are medians. On the left are the tokens predicted from a
# state whose experts changed, and on the right all others. What to notice: replay (blue) lowers the
# change of the tokens on the left, here by a third, and leaves those on the right as they are. It
# does not bring the change to zero: the weights themselves have moved, and at this learning rate
# that movement is the larger part.

# %% [markdown]
# ## The measurement
#
# The live part above is a single seed of a tiny model. [The routing
# ablation](../ablations/routing_replay/README.md) has four layers, three seeds, nine arms, and
# rules that were written before the run. Its figures below are drawn from its checked-in numbers:

# %%
mixture.measured("expert_drift")

# %% [markdown]
# **Figure 3. How experts drift.** Share of the activated experts that an update changes. What to
# notice: *(a, b)* the learning rate decides, almost proportionally; GSPO's paper reports 10 % per
# update on 48 layers. *(c)* Deeper layers change more on average, but three seeds cannot
# distinguish that from no effect. *(d)* Changes add up.

# %%
mixture.measured("sampler_mismatch")

# %% [markdown]
# **Figure 4. Mismatch and ratios.** What to notice: *(a)* R3 (green) lowers the divergence between
# sampler and learner several times over; hollow triangles are the same tokens without R3's routes.
# *(d to f)* Neither kind of replay visibly narrows the spread of the ratios: orange, blue and green
# coincide.

# %%
mixture.verdicts([
  "T38", "T39, R3", "E5, learning rate", "E7, control: float32 sampler",
  "E7, GRPO learns", "E6, GRPO collapses without replay",
])

# %%
mixture.measured("training")

# %% [markdown]
# **Figure 5. Learning does not depend on the routes** at this size: at a learning rate of 3e-4 all
# arms coincide *(a)*, and at 2e-3 all fall, with and without replay *(c)*. It does *not* follow
# that replay is useless: here an update changes 0.2 % of the experts, and in the papers 10 %. The
# result shows that the machinery is exact and that the divergence falls as it should. A negative
# result at small scale is a statement about the scale. [A deeper
# mixture](../claims/experts/README.md) changes 7 % of its experts in 15 updates, and replay halves
# the variance of the log-ratios there. GRPO collapses, with replay in 7 and without in 9 of 13
# seeds, but in 8 where there is nothing to route; GSPO in none.

# %% [markdown]
# ## Exercises
#
# 1. Raise `learning_rate` in `go_stale` until a tenth of the experts change per update
#    (`updates=1`). Does replay now narrow the ratios?
# 2. Count the expert changes that occur in only one of the two layers. Do the first layer's changes
#    explain the second layer's?
# 3. R3 needs the sampler's routes for every token. How many bytes is that for 48 layers, 8 experts
#    per token and 512 responses of 16,384 tokens, at two bytes per id? Compare with the
#    log-probabilities.
# 4. Run `python -m jaxrl_llm.main --config=configs/gspo.py:moe --config.moe.replay=R3` and read
#    `moe/*` and `rollout_corr/*` in its metrics with the tools of [lecture 2](02_read_a_run.ipynb).
# 5. GSPO's paper says that a sequence-level ratio makes routing replay unnecessary; R3's authors
#    find GSPO with R3 better than without. Design the smallest experiment that could decide between
#    the two, and write down its pass rule first.
#
# ## Papers
#
# GSPO, with vanilla routing replay: [2507.18071](https://arxiv.org/abs/2507.18071). R3:
# [2510.11370](https://arxiv.org/abs/2510.11370). Mismatch times staleness, R2 against R3:
# [2512.01374](https://arxiv.org/abs/2512.01374). Qwen3, the family of mixtures that these papers
# train: [2505.09388](https://arxiv.org/abs/2505.09388).
#
# Next: [add your objective](05_add_your_objective.ipynb).
