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
# In a mixture of experts a small *router* sends each token to a few of many sub-networks. That
# choice is discrete: a tiny change of the weights, or of the arithmetic, can send a token to other
# experts. Importance ratios compare two policies token by token, so when the routes differ they
# compare two different networks. This lecture shows what drifts, on a model that trains here in
# seconds; what R2 and R3 do about it; and then what a larger measurement found, which is not what
# one would hope.

# %%
from experiments.notebooks import small_mixture as mixture

# %% [markdown]
# ## The router
#
# For a token with state $x$ the router gives each of $E$ experts a score $h = W x$, keeps the best
# $K$, and mixes their outputs:
#
# $$\mathcal T = \mathrm{top}_K(h), \qquad g_i = \frac{e^{h_i}}{\sum_{j \in \mathcal T} e^{h_j}} \;\; (i \in \mathcal T), \qquad
# y = \sum_{i \in \mathcal T} g_i\, E_i(x).$$
#
# The gates $g$ are smooth in the weights, and gradients flow through them. The set $\mathcal T$ is
# not: where the $K$-th and the next score are close, an update of $10^{-3}$ may swap them, and $y$
# jumps.
#
# Three policies meet in one training step, each with routes of its own:
#
# $$\frac{\pi_\theta(y_t)}{\mu(y_t)} \;=\;
# \underbrace{\frac{\pi_\mathrm{old}(y_t \mid \text{routes of the learner})}{\mu(y_t \mid
# \text{routes of the sampler})}}_{\text{mismatch}} \;\times\; \underbrace{\frac{\pi_\theta(y_t \mid
# \text{new routes})}{\pi_\mathrm{old}(y_t \mid \text{old routes})}}_{\text{staleness, } r_t}.$$
#
# The first factor exists because the sampler $\mu$ computes in lower precision or in another order
# than the learner, with the *same* weights. The second because the learner makes several updates on
# one rollout batch.

# %% [markdown]
# ## A small mixture
#
# Two layers of 8 experts, of which a token visits 2; it imitates a teacher of arithmetic for 60
# steps, so that it writes workings such as `7+8=15⏎15-5=10⏎#10`. Then a sampler in bfloat16 draws
# 32 responses, and the learner, in float32, makes four updates of GRPO on them. This trains here
# and now; most of the time goes into compiling.

# %%
bed, params = mixture.warm_mixture()
stale = mixture.go_stale(bed, params, updates=4, learning_rate=1e-3)

# %%
mixture.route_map(stale)

# %% [markdown]
# **Figure 1. Experts of one response, before and after four updates.** A column is a token, a mark
# an expert that it visits. What to see: most routes stay (blue). Those that change come in pairs,
# one expert left (orange) and one taken up (green). The second layer changes more than the first:
# what it sees has already been changed by the first.

# %% [markdown]
# ## Mismatch: the same weights, another precision
#
# Before any update: the learner's pass over the sampler's tokens, routed live, with its own routes
# replayed, and with the sampler's. The divergence is the k3 estimate of
# $\mathrm{KL}(\mu \Vert \pi_\mathrm{old})$, the mean of $k - 1 - \log k$ with
# $k = \pi_\mathrm{old} / \mu$.

# %%
mixture.sampler_table(stale)

# %% [markdown]
# Only a few tokens in a thousand are sent elsewhere, and yet they carry most of the divergence:
# with the sampler's routes the KL falls by an order of magnitude. What is left is bfloat16's
# rounding. Replaying one's own routes is, as it must be, no change at all:

# %%
mixture.replay_is_exact(stale)

# %% [markdown]
# ## R2 and R3
#
# **Routing replay** records which experts a token visited and forces the same choice later. Only
# the *set* $\mathcal T$ is replayed. The gates $g$ are computed from the live scores of the experts
# in it, so the router goes on learning:
#
# $$g_i = \frac{I_i\, e^{h_i^{\theta}}}{\sum_j I_j\, e^{h_j^{\theta}}}, \qquad I = \text{the recorded choice}.$$
#
# | | whose routes | in which passes | what it removes |
# | --- | --- | --- | --- |
# | **R2** | the learner's own, at $\pi_\mathrm{old}$ | all updates of a rollout batch | the routes' part of staleness |
# | **R3** | the sampler's | $\pi_\mathrm{old}$ and all updates | the routes' part of mismatch and of staleness |
#
# R2 changes nothing in the first update; from the second on it optimises a policy that routes as
# the old one did, which is not the policy that will be sampled from next. R3 has that bias from the
# first update on. In a config it is one field: `config.moe.replay = "R2"` or `"R3"`.
#
# The same four updates, looked at with and without replay:

# %%
mixture.ratio_table(stale)

# %% [markdown]
# Live, about one activated expert in fourteen is another one after four updates. With replay none
# is, by construction. But the *spread of the ratios* hardly shrinks, and the largest ratio does
# not. Why? Look at the tokens whose experts changed, and at all others:

# %%
mixture.gate_drift(stale)

# %% [markdown]
# **Figure 2. What a changed route does to a token.** Change of $\log \pi$ over the four updates, a
# dot a token, bars are medians; left the tokens that were predicted from a state whose experts
# changed, right all others. What to see: replay (blue) brings the changed ones down to the level of
# the others, by about a third here. It cannot go below: the weights themselves have moved, and at
# this learning rate that movement is the larger part.

# %% [markdown]
# ## The measurement
#
# The live part above is one seed of a tiny model. [The routing
# ablation](../ablations/routing_replay/README.md) has four layers, three seeds, nine arms, and
# rules that were written before the run. Its figures, from its checked-in numbers:

# %%
mixture.measured("expert_drift")

# %% [markdown]
# **Figure 3. How experts drift.** Share of the activated experts that an update changes. What to
# see: *(a, b)* the learning rate decides, almost proportionally; GSPO's paper reports 10 % an
# update on 48 layers. *(c)* deeper layers change more on average, but three seeds cannot tell that
# from nothing. *(d)* Changes add up.

# %%
mixture.measured("sampler_mismatch")

# %% [markdown]
# **Figure 4. Mismatch and ratios.** What to see: *(a)* R3 (green) lowers the divergence of sampler
# and learner several times over; hollow triangles are the same tokens without its routes. *(d to
# f)* no replay is seen to narrow the spread of the ratios: orange, blue and green lie together.

# %%
mixture.verdicts([
  "T38", "T39, R3", "E5, learning rate", "E7, control: float32 sampler",
  "E7, GRPO learns", "E6, GRPO collapses without replay",
])

# %%
mixture.measured("training")

# %% [markdown]
# **Figure 5. Learning does not notice the routes** at this size: at 3e-4 all arms lie on each other
# *(a)*, at 2e-3 all fall, with replay and without *(c)*. That replay is useless does *not* follow:
# here an update changes 0.2 % of the experts, and in the papers 10 %. What is shown is that the
# machinery is exact, and that the divergence falls as it should. A negative result at small scale
# is a statement about the scale.

# %% [markdown]
# ## Exercises
#
# 1. Raise `learning_rate` in `go_stale` until a tenth of the experts change per update
#    (`updates=1`). Does replay now narrow the ratios?
# 2. Count the experts that only one of two layers changes. Is the second layer's change explained
#    by the first's?
# 3. R3 needs the routes of every token of the sampler. How many bytes is that for 48 layers, 8
#    experts a token, 512 responses of 16,384 tokens, at two bytes an id? Compare with the
#    log-probabilities.
# 4. Run `python -m jaxrl_llm.main --config=configs/gspo.py:moe --config.moe.replay=R3` and read
#    `moe/*` and `rollout_corr/*` in its metrics with the tools of [lecture 2](02_read_a_run.ipynb).
# 5. GSPO's paper says that a sequence-level ratio makes routing replay unnecessary; R3's authors
#    find GSPO with R3 better than without. Design the smallest experiment that could decide, and
#    write down its pass rule first.
#
# ## Papers
#
# GSPO, with vanilla routing replay: [2507.18071](https://arxiv.org/abs/2507.18071). R3:
# [2510.11370](https://arxiv.org/abs/2510.11370). Mismatch times staleness, R2 against R3:
# [2512.01374](https://arxiv.org/abs/2512.01374). Qwen3, the mixtures that all of this is about:
# [2505.09388](https://arxiv.org/abs/2505.09388).
#
# Next: [add your objective](05_add_your_objective.ipynb).
