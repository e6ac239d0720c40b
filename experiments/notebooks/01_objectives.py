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
# PPO, GRPO, DAPO, GSPO, SAPO and the many others look like as many algorithms. Seen from a single
# token, they are one algorithm with three design choices, and nearly everything that their papers
# argue about is the shape of one curve. This lecture derives that curve, draws it for every
# objective in `jaxrl_llm.objectives.OBJECTIVES`, and then shows what it does to a batch.
#
# Nothing here needs a model or a GPU. Objectives are plain functions of arrays, and every picture
# is obtained by differentiating them. No method's formula is written down a second time.

# %%
import numpy as np

from experiments.notebooks import advantage_pictures
from experiments.notebooks import objective_pictures as show
from jaxrl_llm import objectives

# %% [markdown]
# ## The policy gradient
#
# A policy $\pi_\theta$ answers a prompt $x$ with a response $y = (y_1, \dots, y_T)$, and a verifier
# assigns it a reward $R$. The goal is a larger $\mathbb{E}\,R$. Its gradient has been known since
# Williams (1992):
#
# $$\nabla_\theta\, \mathbb{E}\,R \;=\;
# \mathbb{E}_{y \sim \pi_\theta} \sum_{t=1}^{T} A\;
# \nabla_\theta \log \pi_\theta(y_t \mid x, y_{\lt t}).$$
#
# $A$ is the **advantage**: the reward minus a baseline that does not depend on the response. GRPO
# draws $G$ responses to the same prompt and takes
# $A_i = (R_i - \mathrm{mean}_j R_j) / \mathrm{std}_j R_j$. A correct answer among many wrong ones
# therefore gets a large advantage, and a group that is all correct or all wrong teaches nothing.
#
# There is one catch: the expectation is over responses of the *current* policy. Sampling is the
# expensive part, so in practice a large batch is sampled from $\pi_\mathrm{old}$ and then used for
# several updates. From the second update on, the samples come from a different policy.

# %% [markdown]
# ## The ratio, and why it is noisy
#
# Importance sampling corrects for this difference. The ratio of a token, the ratio of the whole
# response, and its length-normalised version are
#
# $$r_t = \frac{\pi_\theta(y_t \mid x, y_{\lt t})}{\pi_\mathrm{old}(y_t \mid x, y_{\lt t})} = e^{z_t}, \qquad
# \rho = \prod_{t=1}^T r_t, \qquad s = \rho^{1/T} = \exp\Big(\frac1T \sum_t z_t\Big).$$
#
# * $r_t$ is the **token** ratio, which PPO, GRPO, DAPO and SAPO use. Each is correct on average,
#   $\mathbb{E}_\mathrm{old}[r_t \mid y_{\lt t}] = 1$, but each is a weight estimated from one
#   sample, and it says nothing about the tokens around it.
# * $\rho$ is the true importance weight of the whole response. It is unbiased, but useless for long
#   responses: its variance grows exponentially with the length.
# * $s$ is the **length-normalised** ratio of GSPO, the geometric mean of the $r_t$. Its spread
#   shrinks with the length. It is *no longer* an importance weight
#   ($\mathbb{E}_\mathrm{old}[s] \le 1$ at a fixed length): it accepts a bias in exchange for a much
#   smaller variance.
#
# The picture below uses synthetic log-ratios, independent and normal with a standard deviation of
# 0.05 nats and $\mathbb{E}[r] = 1$.

# %%
show.ratio_noise([1, 4, 16, 64, 256, 1024], spread=0.05)

# %% [markdown]
# **Figure 1. Three ratios of the same responses.** *a* Responses of 1,024 tokens. The token
# log-ratios (orange) have the spread that was put in, the log of the product (grey) extends far
# beyond the plot, and the sequence log-ratio (blue) is a narrow spike. *b* The spread of
# $\log \rho$ grows as $\sqrt T$, and the spread of $\log s$ falls as $1/\sqrt T$. What to notice: a
# band such as $[0.8, 1.2]$ means one thing for $r$ and something entirely different for $s$. GSPO's
# paper clips at 3e-4 and 4e-4; a band for responses of thousands of tokens does not suit responses
# of a few dozen. Real tokens are not independent: [the ratio lab](../ablations/ratio_lab/README.md)
# measures the same curves on a transformer.
#
# Does the noise reach the *gradient*? [A study](../studies/noise/README.md) measured its variance
# on stale responses of 8 to 64 tokens, relative to no ratio. For $\rho$ it grows as $T^{1.8}$.
# For $r$ and $s$ no growth is shown: that token ratios get noisier with the length was not seen in
# twelve seeds, though three pilot seeds had suggested it. A gate lowers the variance, SAPO's most.

# %% [markdown]
# ## Three slots
#
# Write $z$ for a log-ratio at any level. Every objective in this package is
#
# $$\mathcal L = -\sum_{i,t} \underbrace{w_{i,t}}_{\text{weights}}\;
# \underbrace{g}_{\text{gate}}\big(\underbrace{z_{i,t}}_{\text{log-ratio}},\, A_{i,t}\big).$$
#
# 1. **Log-ratio**: the level at which the two policies are compared: token, sequence or product.
# 2. **Gate**: how far a ratio may carry the policy.
# 3. **Weights**: how tokens and responses of different lengths are averaged. The weights are
#    computed once, on the whole batch.
#
# Penalties (KL, entropy) and a critic's loss are additional terms of the sum. A new algorithm is a
# new row of this table, which is read from the docstrings of the package:

# %%
show.slots_table(list(objectives.OBJECTIVES))

# %% [markdown]
# `custom` takes each of the three by name, including combinations that no paper has named.
# REINFORCE's paper has no arXiv number: R. J. Williams, *Simple statistical gradient-following
# algorithms for connectionist reinforcement learning*, Machine Learning 8, 1992.

# %% [markdown]
# ## The coefficient C
#
# Differentiate that loss. For every gate, the gradient has the form
#
# $$-\nabla_\theta \mathcal L = \sum_{i,t} w_{i,t}\; C_{i,t}\; A_{i,t}\; \nabla_\theta \log \pi_\theta(y_{i,t}).$$
#
# $C$ is one number per token, and it *is* the method. REINFORCE has $C = 1$, and plain importance
# sampling has $C = r$. PPO has
#
# $$\min\big(r A,\; \mathrm{clip}(r, 1 - \varepsilon_l, 1 + \varepsilon_h) A\big)
# \quad\Rightarrow\quad C = \begin{cases} r \cdot \mathbf 1[r \le 1 + \varepsilon_h] & A > 0 \\
# r \cdot \mathbf 1[r \ge 1 - \varepsilon_l] & A < 0 \end{cases}$$
#
# and SAPO has a soft gate, with $\sigma$ the logistic function and a temperature $\tau$ for each
# sign of $A$:
#
# $$\frac4\tau\, \sigma\big(\tau (r - 1)\big) A \quad\Rightarrow\quad C = r \cdot \mathrm{sech}^2\big(\tau (r - 1) / 2\big).$$
#
# To extract $C$ from the code, divide the gradient by $w A$:

# %%
objective = show.policy_term("grpo")
ratios = np.array([0.5, 0.9, 1.0, 1.1, 1.5])
abs(show.curve(objective, ratios, +1)), abs(show.curve(objective, ratios, -1))

# %% [markdown]
# For $A > 0$ the token at $r = 1.5$ has left the band upwards and gets no gradient. For $A < 0$ it
# keeps its full weight of 1.5: it has moved in the *wrong* direction, and the clip lets it come
# back. "Clipping cuts the gradient when the ratio leaves the band" is true on one side only.

# %%
show.curves({
  "plain": ["reinforce"], "token, hard": ["grpo", "dapo"], "sequence, hard": ["gspo"], "token, soft": ["sapo"],
})

# %% [markdown]
# **Figure 2. Hard and soft gates.** $C$ against the ratio, for $A > 0$ (above) and $A < 0$ (below).
# What to notice: a hard clip is a cliff on one side; on the other side, for $A < 0$, its weight
# grows with $r$ without bound. SAPO's gate has no cliff, and its weight never exceeds 1.58, at
# $r = 2.06$. At its published temperatures (1.0 and 1.05), however, it is nearly the straight line
# $C = r$ for $|r - 1| < 0.3$: it acts on outliers, not on ordinary drift. On this scale GSPO's band
# of 3e-4 below and 4e-4 above looks like a step at 1.

# %%
show.curves(show.FAMILIES, lowest=-1.15)

# %% [markdown]
# **Figure 3. Every objective.** The curves are computed for responses of one token, where $r$, $s$
# and $\rho$ are the same number, with $\pi_\mathrm{old} = 0.3$ for the methods that read it. Thick
# lines lie under thin ones, so that coinciding curves remain visible. What to notice:
#
# * All curves except `sft`'s pass through $C = 1$ at a ratio of 1. **On-policy, all methods are the
#   same**, up to weights and advantages. With one update per rollout batch the gate never acts.
# * `ppo`, `grpo`, `dr_grpo` and `reinforce_plus_plus` share one curve: they differ only in weights,
#   penalties and advantages.
# * `gspo`, `gspo_token` and `luspo` differ in their weights, in their bands, and in how they treat
#   unequal advantages.
# * `custom` is shown here as the sequence ratio through SAPO's gate, a smooth GSPO. Its curve is
#   SAPO's, since the two differ only from two tokens on.
# * Capped weights (`cispo`, `minpro`) never cut a gradient off; the cap, 5, lies beyond the axis.
#   Trust regions (`dppo_*`, `cppo`) measure probabilities rather than ratios, so their edges move
#   with $\pi_\mathrm{old}$: a rare token may become many times as likely.
# * `dro` has neither a ratio in its weight nor a clip: a square pulls the token back, a little more
#   the further it has moved. `clip_cov` and `kl_cov` are shown without the few tokens that they
#   select from a whole batch by the covariance of log-probability and advantage; those are left
#   out, or pulled back.
# * `topr` is flat at 1 for a good response: it is imitated, however unlikely it has become. A bad
#   one counts less, the less likely the policy still finds it, and never more than once.
# * `fipo` is DAPO's clip with a weight of 1 to 1.2 that grows with the log-ratios of the tokens
#   that follow, here those of the token itself. The weight returns to 1 for $A < 0$ and ratios
#   above 4, beyond the axis.
# * `sft` reads no advantage. It makes every token more likely, so its $C$ is $-1$ for $A < 0$. It
#   is the warm start, written as one more objective.

# %% [markdown]
# ## On a batch
#
# Sixteen synthetic responses of 40 tokens, half of them with $A > 0$. The log-ratios are
# heavy-tailed, and each response has a drift of its own. The first response is calm except for one
# token in the middle, with $r = 2.5$. GSPO's band is widened to ±0.02 to suit 40 tokens.

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
# **Figure 4. The same batch under four rules.** A row is a response, the colour is $C$, and black
# is exactly zero. What to notice: GRPO *(b)* is speckled. Neighbouring tokens of a sentence get
# weights from about 0.6 to 1.4, and the tokens that moved furthest in the useful direction are
# blacked out. GSPO *(c)* gives one weight to all tokens of a response and drops whole responses; a
# single outlier suffices to drop the first one, including 39 innocent tokens. SAPO *(d)* keeps the
# speckle and drops nothing. At $\tau = 1$ the outlier itself still weighs *more* than its
# neighbours: $2.5 \cdot \mathrm{sech}^2(0.75) = 1.49$. A soft gate does not necessarily ignore
# outliers.

# %% [markdown]
# ## How much of a batch is silent
#
# A token with $C = 0$ was paid for but teaches nothing. The number of such tokens depends on how
# far the policy has moved.

# %%
show.zero_mass(["grpo", "gspo", "gmpo", "dppo_tv", "vespo", "sapo"])

# %% [markdown]
# **Figure 5. Tokens without gradient** in responses of 64 tokens with normal log-ratios, against
# the spread of the log-ratios. What to notice: with its paper's band, GSPO loses about half of the
# tokens from a spread of 0.01 on, since that band is meant for longer responses; GRPO loses none
# until the ratios spread by 0.1. SAPO never loses any. Smoothness alone is not enough, though:
# VESPO weights the true product $\rho$ smoothly and still loses responses, because $\rho$ itself
# runs away. Nor do silent tokens prove harm: GSPO trains well with them, as lecture 3 shows.

# %% [markdown]
# ## SAPO as a smooth GSPO
#
# SAPO's paper argues that, as long as the policy moves little, its token gates act together like a
# single gate on the sequence. Let $g(z) = \mathrm{sech}^2(\tau z / 2)$, let $\mu = \log s$ be the
# mean log-ratio of a response, and let $\mathrm{Var}$ be the variance of its log-ratios. In a
# Taylor expansion around $\mu$ the linear term vanishes, and $\sup |g''| = \tau^2 / 2$, so
#
# $$D = \Big| \frac1T \sum_t g(z_t) - g(\mu) \Big| \;\le\; \frac{\tau^2}{4}\, \mathrm{Var}.$$

# %%
show.smooth_limit()

# %% [markdown]
# **Figure 6. The smooth limit** on 600 synthetic responses (normal, heavy-tailed, or with an
# outlier), $\tau = 1$. *a* The mean of the token gates against the gate of the mean: the points lie
# on the diagonal where the log-ratios vary little (blue). *b* The difference stays below the bound
# and reaches it. What to notice: SAPO and a smooth GSPO are nearly the same method while the
# variance stays below a few hundredths, and diverge beyond that. The paper finds a variance below
# 0.02 in most responses, and a wider one in mixtures of experts than in dense models.

# %% [markdown]
# ## The third slot: how much each token counts
#
# Weights are easily overlooked, but they decide how much a *long* response is worth.

# %%
show.weighings([2, 4, 8, 16, 32, 64], max_tokens=64)

# %% [markdown]
# **Figure 7. Five ways to weight** a batch of six responses of 2 to 64 tokens, one of each length,
# two to a prompt.
# Under the *sequence mean* (GRPO) every response counts equally, so a token of a long response
# counts little: a long wrong answer is penalised less per token than a short one. The *token mean*
# (DAPO) and the *constant* (Dr. GRPO) give all tokens the same weight; the former depends on the
# lengths of the other responses, the latter does not. The *prompt mean* stands between the two
# means: it is DAPO's own equation, in which every prompt counts equally and every token of a
# prompt's responses does. The *sequence sum* (MiniRL, LUSPO) is the constant without its scale.

# %% [markdown]
# ## Where A comes from
#
# Everything above took $A$ as given. It is a choice of its own, `config.advantage.estimator`, and
# it decides which *prompts* teach. Most estimators subtract the mean reward of the prompt's
# responses; they differ in what they divide by.

# %%
advantage_pictures.by_success(["leave_one_out", "group", "maxrl", "batch_scaled", "pass_at_k", "rloo_n"])

# %% [markdown]
# **Figure 8. Six estimators** for rewards of 0 and 1, against the success rate of the prompt among
# its 16 responses. *a* Advantage of a right response, *b* of a wrong one. What to notice:
#
# * `leave_one_out` (RLOO) divides by nothing. `rloo_n` is the same unless rewards are missing.
#   `batch_scaled` (Lite PPO, ScaleRL) divides by one number for the whole batch, so its lines are
#   straight too.
# * `group` (GRPO) divides by the prompt's own deviation, which raises both ends: the only right
#   response of 16 gets 3.75, and so does, with the other sign, the only wrong one.
# * `maxrl` divides by the prompt's mean, which raises the hard end alone: the only right response
#   of 16 gets 15, beyond the axis, and a wrong one gets −1 wherever another response is right.
# * `pass_at_k` rewards the best of $k = 2$. If only one response of 16 is wrong, every pair has a
#   right one, and all advantages are exactly 0.
#
# `per_reward` (GDPO) is `group` for each of several rewards. `steps` and `rae` compare the steps of
# a response and the turns of a game, `gigpo` and `hierarchical` those that began in the same state
# or try to solve the same problem, and `returns` and `gae` count the rewards still to come from
# each token. `gtpo` moves the outcome between tokens by their entropy. `opo` subtracts the mean
# reward of a token in place of that of a response, which differs where lengths do. `spo` draws one
# response per prompt and remembers a pass rate for each. `otb` has a baseline of its own at each
# token, weighted by how much gradient every response has had so far.

# %%
advantage_pictures.by_entropy()

# %% [markdown]
# **Figure 9. GTPO per token**, for 32 prompts with 4 right and 4 wrong responses of 16 tokens,
# whose entropies are drawn at random. *a* Among right responses an uncertain token gets more than a
# certain one at the same place. *b* Among wrong responses a certain token is punished most. What to
# notice: the two are normalised apart, so the sign does not follow the outcome: 59 % of the tokens
# of right responses have $A < 0$, and 63 % of those of wrong ones have $A > 0$.

# %% [markdown]
# ## Use an objective
#
# An objective works on plain arrays, in any training loop:

# %%
old = np.log(np.array([[0.5, 0.2, 0.9], [0.3, 0.6, 0.1]]))
mask = np.array([[1, 1, 1], [1, 1, 0]])
sapo = objectives.make("sapo")
loss, metrics = objectives.value(sapo, old + 0.1, old, np.array([1.0, -1.0]), mask)
f"loss {loss:.3f}, gates {metrics['sapo/gate_pos']:.4f} (A > 0) and {metrics['sapo/gate_neg']:.4f} (A < 0)"

# %% [markdown]
# ## Exercises
#
# 1. Show that $\mathbb{E}_\mathrm{old}[s] \le 1$ for responses of one length. Which inequality
#    proves it, and when does equality hold?
# 2. Draw `show.curves({"tau": [...]})` with pairs
#    `("5", objectives.make("sapo", tau_pos=5.0, tau_neg=5.0))`. From which $\tau$ on does the
#    outlier of figure 4 weigh less than an on-policy token?
# 3. DAPO clips at 0.2 below and 0.28 above. To what probability can a token of probability 0.01
#    grow before its gradient vanishes? And a token of probability 0.9? Compare with `dppo_tv`.
# 4. In figure 4, widen GSPO's band until no response is dropped. How does the width needed depend
#    on the number of tokens (`batch_log_ratios(tokens=...)`)?
# 5. Add `cispo` and `maspo` to figure 5. Before running it, explain what you expect to see.
# 6. In figure 8, which estimator gives the responses of a prompt that is solved half of the time
#    the largest sum of $|A|$, and which the prompt that is solved once in 16?
# 7. Make a smooth RLOO:
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
# [2602.04879](https://arxiv.org/abs/2602.04879) · DRO
# [2405.19107](https://arxiv.org/abs/2405.19107) · Clip-Cov and KL-Cov
# [2505.22617](https://arxiv.org/abs/2505.22617) · MaxRL
# [2602.02710](https://arxiv.org/abs/2602.02710) · Pass@k Training
# [2508.10751](https://arxiv.org/abs/2508.10751) · Lite PPO
# [2508.08221](https://arxiv.org/abs/2508.08221) · GTPO
# [2508.04349](https://arxiv.org/abs/2508.04349). Measured versions of figures 3 to 6, with
# verdicts: [objective shapes](../ablations/objective_shapes/README.md).
#
# Next: [how to read a run](02_read_a_run.ipynb).
