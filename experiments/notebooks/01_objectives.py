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
# # 1. Objectives: what an algorithm does to a token
#
# PPO, GRPO, DAPO, GSPO, SAPO and a dozen others look like a dozen algorithms. Seen from a single
# token they are one algorithm with three choices in it, and nearly everything that their papers
# argue about is the shape of one curve. This lecture derives that curve, draws it for every
# objective in `jaxrl_llm.objectives.OBJECTIVES`, and then looks at what it does to a batch.
#
# Nothing here needs a model or a GPU: objectives are plain functions of arrays, and all pictures
# come from differentiating them. No formula of a method is typed twice.

# %%
import numpy as np

from experiments.notebooks import objective_pictures as show
from jaxrl_llm import objectives

# %% [markdown]
# ## The policy gradient, once
#
# A policy $\pi_\theta$ answers a prompt $x$ with a response $y = (y_1, \dots, y_T)$; a verifier
# gives it a reward $R$. We want a larger $\mathbb{E}\,R$. Its gradient is known since Williams
# (1992):
#
# $$\nabla_\theta\, \mathbb{E}\,R \;=\;
# \mathbb{E}_{y \sim \pi_\theta} \sum_{t=1}^{T} A\; \nabla_\theta \log \pi_\theta(y_t \mid x, y_{\lt
# t}).$$
#
# $A$ is the **advantage**: the reward minus something that does not depend on the response. GRPO
# draws $G$ responses to the same prompt and takes
# $A_i = (R_i - \mathrm{mean}_j R_j) / \mathrm{std}_j R_j$. So a right answer among many wrong ones
# pushes up hard, and a group that is all right or all wrong teaches nothing.
#
# There is one catch. The expectation is over responses of the policy *as it is now*. Sampling is
# the costly part, so one samples a large batch with $\pi_\mathrm{old}$ and then makes several
# updates on it. From the second update on, the samples are another policy's.

# %% [markdown]
# ## The ratio, and why it is noisy
#
# Importance sampling corrects for that. The ratio of a token is
#
# $$r_t = \frac{\pi_\theta(y_t \mid x, y_{\lt t})}{\pi_\mathrm{old}(y_t \mid x, y_{\lt t})} = e^{z_t}, \qquad
# \rho = \prod_{t=1}^T r_t, \qquad s = \rho^{1/T} = \exp\Big(\frac1T \sum_t z_t\Big).$$
#
# * $r_t$ is the **token's** ratio: what PPO, GRPO, DAPO and SAPO use. Each is right on average,
#   $\mathbb{E}_\mathrm{old}[r_t \mid y_{\lt t}] = 1$, but each is a weight from one sample, and it
#   says nothing about the tokens around it.
# * $\rho$ is the true importance weight of the whole response. It is unbiased and useless for long
#   responses: its variance grows exponentially with the length.
# * $s$ is the **length-normalised** ratio of GSPO, the geometric mean of the $r_t$. Its spread
#   shrinks with length. It is *not* an importance weight any more
#   ($\mathbb{E}_\mathrm{old}[s] \le 1$ at a fixed length): it trades a bias for a much smaller
#   variance.
#
# The picture uses made-up log-ratios, independent and normal with a standard deviation of 0.05 nats
# and $\mathbb{E}[r] = 1$.

# %%
show.ratio_noise([1, 4, 16, 64, 256, 1024], spread=0.05)

# %% [markdown]
# **Figure 1. Three ratios of the same responses.** *a* Responses of 1,024 tokens: the log-ratios of
# single tokens (orange) have the spread that we put in; that of the product (grey) runs far out of
# the picture; that of the sequence (blue) is a needle. *b* The spread of $\log \rho$ grows as
# $\sqrt T$ and that of $\log s$ falls as $1/\sqrt T$. What to see: a band such as $[0.8, 1.2]$ has
# a meaning for $r$, and a wholly different one for $s$. GSPO's paper clips at 3e-4 and 4e-4; a band
# for responses of thousands of tokens does not fit dozens. Real tokens are not independent: [the
# ratio lab](../ablations/ratio_lab/README.md) measures the same curves on a transformer.

# %% [markdown]
# ## Three slots
#
# Write $z$ for a log-ratio at whatever level. Every objective here is
#
# $$\mathcal L = -\sum_{i,t} \underbrace{w_{i,t}}_{\text{weights}}\;
# \underbrace{g}_{\text{gate}}\big(\underbrace{z_{i,t}}_{\text{log-ratio}},\, A_{i,t}\big).$$
#
# 1. **Log-ratio**: at which level the two policies are compared: token, sequence, product.
# 2. **Gate**: how far a ratio may carry the policy.
# 3. **Weights**: how tokens and responses of different lengths are averaged. They are computed
#    once, on the whole batch.
#
# Penalties (KL, entropy) and a critic's loss are further terms that add. A new algorithm is a new
# row of this table, read from the docstrings of the package:

# %%
show.slots_table(list(objectives.OBJECTIVES))

# %% [markdown]
# `custom` takes any of the three by name, also combinations that no paper has named. REINFORCE's
# paper has no arXiv number: R. J. Williams, *Simple statistical gradient-following algorithms for
# connectionist reinforcement learning*, Machine Learning 8, 1992.

# %% [markdown]
# ## The coefficient C
#
# Differentiate that loss. Whatever the gate, the gradient has the form
#
# $$-\nabla_\theta \mathcal L = \sum_{i,t} w_{i,t}\; C_{i,t}\; A_{i,t}\; \nabla_\theta \log \pi_\theta(y_{i,t}).$$
#
# $C$ is a number for each token, and it *is* the method: REINFORCE has $C = 1$; plain importance
# sampling has $C = r$; PPO's
#
# $$\min\big(r A,\; \mathrm{clip}(r, 1 - \varepsilon_l, 1 + \varepsilon_h) A\big)
# \quad\Rightarrow\quad C = \begin{cases} r \cdot \mathbf 1[r \le 1 + \varepsilon_h] & A > 0 \\ r
# \cdot \mathbf 1[r \ge 1 - \varepsilon_l] & A < 0 \end{cases}$$
#
# and SAPO's soft gate, with $\sigma$ the logistic function and a temperature $\tau$ for each sign
# of $A$,
#
# $$\frac4\tau\, \sigma\big(\tau (r - 1)\big) A \quad\Rightarrow\quad C = r \cdot \mathrm{sech}^2\big(\tau (r - 1) / 2\big).$$
#
# To get $C$ out of the code we divide the gradient by $w A$:

# %%
objective = show.policy_term("grpo")
ratios = np.array([0.5, 0.9, 1.0, 1.1, 1.5])
abs(show.curve(objective, ratios, +1)), abs(show.curve(objective, ratios, -1))

# %% [markdown]
# For $A > 0$ the token at $r = 1.5$ has left the band upwards and gets no gradient. For $A < 0$ it
# keeps its full weight of 1.5: it has moved the *wrong* way, and the clip lets it come back.
# "Clipping cuts the gradient when the ratio leaves the band" is true on one side only.

# %%
show.curves({
  "plain": ["reinforce"], "token, hard": ["grpo", "dapo"], "sequence, hard": ["gspo"], "token, soft": ["sapo"],
})

# %% [markdown]
# **Figure 2. Hard and soft.** $C$ against the ratio, for $A > 0$ above and $A < 0$ below. What to
# see: a hard clip is a cliff on one side; on the other side, for $A < 0$, its weight grows without
# bound with $r$. SAPO's gate has no cliff, and its weight never exceeds 1.58, at $r = 2.06$. But at
# its published temperatures (1.0 and 1.05) it is nearly the straight line $C = r$ for
# $|r - 1| < 0.3$: it acts on outliers, not on ordinary drift. GSPO's band of 3e-4 below and 4e-4
# above looks like a step at 1 on this scale.

# %%
show.curves(show.FAMILIES, lowest=-1.15)

# %% [markdown]
# **Figure 3. Every objective.** Computed for responses of one token, where $r$, $s$ and $\rho$ are
# the same number; $\pi_\mathrm{old} = 0.3$ where a method reads it. Thick lines lie under thin
# ones, so curves that coincide can still be told. What to see:
#
# * All curves but that of `sft` pass through $C = 1$ at a ratio of 1. **On-policy all methods are
#   the same**, up to weights and advantages. With one update per rollout batch the gate never acts.
# * `ppo`, `grpo`, `dr_grpo` and `reinforce_plus_plus` are one curve: they differ in weights,
#   penalties and advantages only.
# * `gspo`, `gspo_token` and `luspo` differ in weights, band, and in what they do with unequal
#   advantages.
# * `custom` is shown as the sequence's ratio through SAPO's gate, a smooth GSPO; its curve is
#   SAPO's, since the two differ from two tokens on.
# * Capped weights (`cispo`, `minpro`) never end a gradient: the cap, 5, is off the axis. Trust
#   regions (`dppo_*`, `cppo`) measure probabilities and not ratios, so their edges move with
#   $\pi_\mathrm{old}$: a rare token may grow a lot.
# * `sft` reads no advantage: it makes every token likelier, so for $A < 0$ its $C$ is $-1$. It is
#   the warm start, written as one more objective.

# %% [markdown]
# ## On a batch
#
# Sixteen made-up responses of 40 tokens, half of them with $A > 0$. Log-ratios are heavy-tailed,
# each response has a drift of its own, and the first response is calm but for one token in the
# middle, with $r = 2.5$. GSPO's band is widened to ±0.02 to suit 40 tokens.

# %%
log_ratios = show.batch_log_ratios()
advantages = np.repeat([1.0, -1.0], 8)
rules = {
  "REINFORCE": show.policy_term("reinforce"),
  "GRPO": show.policy_term("grpo"),
  "GSPO": show.policy_term("gspo", clip_low=0.02, clip_high=0.02),
  "SAPO": show.policy_term("sapo"),
}
show.heat_maps(rules, log_ratios, advantages)

# %% [markdown]
# **Figure 4. The same batch under four rules.** A row is a response; the colour is $C$; black is
# exactly zero. What to see: GRPO *(b)* speckles: neighbours in one sentence get weights from about
# 0.6 to 1.4, and the tokens that moved most in the useful direction are blacked out. GSPO *(c)*
# gives one weight to all tokens of a response, and drops responses whole; one outlier is enough to
# drop the first response, 39 innocent tokens included. SAPO *(d)* keeps the speckle and drops
# nothing. At $\tau = 1$ the outlier itself still weighs *more* than its neighbours:
# $2.5 \cdot \mathrm{sech}^2(0.75) = 1.49$. Softness does not mean that outliers are ignored.

# %% [markdown]
# ## How much of a batch is silent
#
# A token with $C = 0$ was paid for and teaches nothing. How many there are depends on how far the
# policy has moved.

# %%
show.zero_mass(["grpo", "gspo", "gmpo", "dppo_tv", "vespo", "sapo"])

# %% [markdown]
# **Figure 5. Tokens without gradient** in responses of 64 tokens with normal log-ratios, against
# their spread. What to see: GSPO with its paper's band loses about half of the tokens from a spread
# of 0.01 on, since that band is made for longer responses; GRPO loses none until ratios spread by
# 0.1. SAPO has none anywhere. Being smooth is not enough, though: VESPO weighs the true product
# $\rho$ smoothly, and loses responses all the same because $\rho$ itself runs away. And a silent
# token is no proof of harm: GSPO trains well with them, as lecture 3 shows.

# %% [markdown]
# ## SAPO as a smooth GSPO
#
# SAPO's paper argues that its token gates act together like one gate on the sequence while the
# policy moves little. Let $g(z) = \mathrm{sech}^2(\tau z / 2)$, $\mu = \log s$ the mean log-ratio
# of a response and $\mathrm{Var}$ the variance of its log-ratios. A Taylor expansion around $\mu$
# loses its linear term, and $\sup |g''| = \tau^2 / 2$, so
#
# $$D = \Big| \frac1T \sum_t g(z_t) - g(\mu) \Big| \;\le\; \frac{\tau^2}{4}\, \mathrm{Var}.$$

# %%
show.smooth_limit()

# %% [markdown]
# **Figure 6. The smooth limit** on 600 made-up responses (normal, heavy-tailed, with an outlier),
# $\tau = 1$. *a* The mean gate of the tokens against the gate of the mean: on the diagonal where
# log-ratios vary little (blue). *b* The difference stays below the bound, and reaches it. What to
# see: SAPO and a smooth GSPO are nearly the same method while the variance stays below a few
# hundredths, and part beyond. The paper finds it below 0.02 in most responses, and wider in
# mixtures of experts than in dense models.

# %% [markdown]
# ## The third slot: who counts how much
#
# Weights are easily overlooked, and they decide what a *long* response is worth.

# %%
show.weighings([2, 4, 8, 16, 32, 64], max_tokens=64)

# %% [markdown]
# **Figure 7. Four ways to weigh** a batch of six responses of 2 to 64 tokens, one of each length.
# Under the *sequence mean* (GRPO) every response counts the same, so a token of a long response
# counts little: a long wrong answer is punished less per token than a short one. The *token mean*
# (DAPO) and the *constant* (Dr. GRPO) give all tokens one weight; the first depends on how long the
# other responses are, the second does not. The *sequence sum* (MiniRL, LUSPO) is the constant
# without its scale.

# %% [markdown]
# ## Use it
#
# An objective on plain arrays, in any training loop:

# %%
old = np.log(np.array([[0.5, 0.2, 0.9], [0.3, 0.6, 0.1]]))
mask = np.array([[1, 1, 1], [1, 1, 0]])
sapo = objectives.make("sapo")
loss, metrics = objectives.value(sapo, old + 0.1, old, np.array([1.0, -1.0]), mask)
f"loss {loss:.3f}, gates {metrics['sapo/gate_pos']:.4f} (A > 0) and {metrics['sapo/gate_neg']:.4f} (A < 0)"

# %% [markdown]
# ## Exercises
#
# 1. Show that $\mathbb{E}_\mathrm{old}[s] \le 1$ for responses of one length. Which inequality is
#    it, and when is it an equality?
# 2. Draw `show.curves({"tau": [...]})` with pairs
#    `("5", objectives.make("sapo", tau_pos=5.0, tau_neg=5.0))`. From which $\tau$ on does the
#    outlier of figure 4 weigh less than an on-policy token?
# 3. DAPO clips at 0.2 below and 0.28 above. To which probability can a token of 0.01 grow before
#    its gradient ends? And one of 0.9? Compare `dppo_tv`.
# 4. In figure 4 widen GSPO's band until no response is dropped. How does that depend on the number
#    of tokens (`batch_log_ratios(tokens=...)`)?
# 5. Add `cispo` and `maspo` to figure 5, and explain what you see before you run it.
# 6. Make a smooth RLOO:
#    `objectives.make("custom", ratio="product", gate="soft", weights="sequence_mean")`. Why is it a
#    bad idea for long responses?
#
# ## Papers
#
# PPO [1707.06347](https://arxiv.org/abs/1707.06347) · GRPO
# [2402.03300](https://arxiv.org/abs/2402.03300) · RLOO
# [2402.14740](https://arxiv.org/abs/2402.14740) · DAPO
# [2503.14476](https://arxiv.org/abs/2503.14476) · Dr. GRPO
# [2503.20783](https://arxiv.org/abs/2503.20783) · CISPO
# [2506.13585](https://arxiv.org/abs/2506.13585) · GSPO
# [2507.18071](https://arxiv.org/abs/2507.18071) · GMPO
# [2507.20673](https://arxiv.org/abs/2507.20673) · SAPO
# [2511.20347](https://arxiv.org/abs/2511.20347) · MiniRL
# [2512.01374](https://arxiv.org/abs/2512.01374) · VESPO
# [2602.10693](https://arxiv.org/abs/2602.10693) · DPPO
# [2602.04879](https://arxiv.org/abs/2602.04879). Measured versions of figures 3 to 6, with
# verdicts: [objective shapes](../ablations/objective_shapes/README.md).
#
# Next: [how to read a run](02_read_a_run.ipynb).
