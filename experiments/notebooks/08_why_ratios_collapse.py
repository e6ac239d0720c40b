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
# # 8. Why ratios collapse, and when they do not
#
# GSPO's paper gives one reason for its existence: the importance ratio of a single token is noise,
# the noise accumulates over a long response, and training collapses. This lecture takes the
# sentence apart. You measure the ratios of a small policy yourself, find the law by which they
# spread with length, see what each clip makes of it, and measure the noise of the *gradient*, which
# is what training follows. Then you read what larger studies found about the last step, from noise
# to collapse, where the evidence is weakest.
#
# Everything up to the studies runs here, in a minute or two.

# %%
from experiments.notebooks import ratio_pictures as show

stale = show.go_stale()

# %% [markdown]
# ## The bed
#
# The prompt is two digits, and the response 64 sums: each token is the sum of the two before it,
# modulo 10. A transformer of 33 thousand weights has imitated a teacher who makes half an error in
# a response. It has then drawn 256 responses, which stay as they are, and was updated 1, 3, 7 and
# 15 times by GRPO on other responses of the same batch. So we have what every learner has whose
# data are a little old: $\log r_t = \log\pi_\theta(y_t) - \log\pi_\mathrm{old}(y_t)$ of each token,
# at four ages.
#
# Three ratios are made of them. A token's own is $r_t$ (PPO, GRPO, DAPO, SAPO). The sequence's is
# their geometric mean, $s = (\prod_t r_t)^{1/T}$ (GSPO). The ratio that importance sampling really
# asks for is the product of all, $\prod_t r_t$; no objective here trains with it without a gate,
# and you will see why.
#
# ## Predict before you look
#
# If the $\log r_t$ were independent with a standard deviation $\sigma$, what would the standard
# deviations of $\log r_t$, $\log s$ and $\log\prod_t r_t$ be for a response of $T$ tokens? Write
# the three powers of $T$ down.

# %%
show.law(stale)

# %% [markdown]
# **Figure 1. Three ratios, three laws.** Standard deviations over the responses, read from their
# first 1, 2, 4 ... tokens; dashed: the powers for independent tokens of equal spread, through the
# first point after 15 updates. *a* A token's ratio has no length in it; that it falls says that the
# first tokens move most. *b* The sequence's ratio narrows with length. *c* The product widens, and
# that is the spread of its *logarithm*: at 1 nat, one response in six counts e times as much as the
# median.

# %%
show.exponents(stale)

# %% [markdown]
# The signs are those of the law, and all three exponents are 0.16 to 0.28 below it, the token's own
# among them: $\sigma$ is not the same everywhere, since the first tokens of a response move most
# and later ones dilute them. So far the paper's argument holds: a mean over a response has less
# noise than its tokens, and a product more.
#
# ## What a clip makes of it
#
# A clip is a band of fixed width, and the ratio that it reads has a width that depends on $T$. For
# the token's ratio nothing changes with length. For the sequence's it does: **a band belongs to a
# length.** The paper's, $[1 - 3\cdot10^{-4}, 1 + 4\cdot10^{-4}]$, was made for thousands of tokens.

# %%
BANDS = {"GRPO, 0.2": (0.2, 0.2), "GSPO, its paper's band": (3e-4, 4e-4), "GSPO, 40 times that": (1.2e-2, 1.6e-2)}
show.left_out(stale, 3, BANDS)

# %% [markdown]
# On 64 tokens and fewer the paper's band leaves out three fifths of everything: nearly every
# response whose ratio has moved the way its advantage pushes it. The same data pass GRPO's clip
# almost untouched. A comparison of the two with the papers' constants on short responses is one of
# an update with less than half an update. After 15 updates:

# %%
show.left_out(stale, 15, BANDS)

# %% [markdown]
# ## From ratios to gradients
#
# Training does not follow ratios. It follows a mean of $w_t A \nabla\log\pi(y_t)$, in which the
# objective decides about $w_t$. What matters is the variance of that mean from response to
# response, relative to the variance with $w_t = 1$, "no ratio". The tool `experiments.gradients`
# measures it for any objective and any checkpoint; here it reads the same 256 responses.

# %%
UNCLIPPED = {"gate": "none", "weights": "sequence_mean"}
LOSSES = {
  "token ratio": ("custom", UNCLIPPED | {"ratio": "token"}),
  "sequence ratio": ("custom", UNCLIPPED | {"ratio": "sequence"}),
  "product of all": ("custom", UNCLIPPED | {"ratio": "product"}),
  "GRPO, 0.2": ("grpo", {"kl_coef": 0.0}),
  "GSPO, 40 times": ("gspo", {"clip_low": 1.2e-2, "clip_high": 1.6e-2}),
  "SAPO": ("sapo", {}),
}
show.gradient_noise(stale, 3, LOSSES)

# %%
show.gradient_noise(stale, 15, LOSSES)

# %% [markdown]
# Read the first column. The product is hopeless: thousands of times the variance, with a fifth to a
# third of the responses doing all the work. The token's ratio adds noise: without a clip it has two
# to three times the variance of no ratio, and GRPO's clip at 0.2, which catches 3 to 4 % of the
# tokens, takes more than half of what was added. The sequence's ratio without a clip is almost no
# ratio at all, 0.8 to 0.9. What GSPO's clip removes, it removes by leaving out more than a third of
# the responses; SAPO's gate halves the variance and leaves out none.
#
# So: *token ratios are noise* holds on this policy. *It grows with length* is another statement. It
# says that the first column, for GRPO relative to GSPO, rises from 8 to 64 tokens:

# %%
show.study_figure()

# %% [markdown]
# **Figure 2. The study of noise**, 12 policies at each of four lengths, after 7 updates. *a* The
# variance relative to no ratio. *b* Its exponent in length, with 95 % intervals. Only the product's
# is above 0.

# %%
show.study_verdicts([
  "slope: GRPO's noise over GSPO's grows with length", "slope: token ratio", "slope: product ratio", "clip lowers GSPO's noise", "SAPO",
  "from noise to outcome",
])

# %% [markdown]
# The interval of GRPO's exponent relative to GSPO's reaches from clearly negative to clearly
# positive, so that it is open whether noise grows with length at all. The pilots of three policies
# had "shown" it. That is lesson enough about three seeds.
#
# That study's task is hard to imitate at 64 tokens, so that it ends there. The task of this lecture
# goes on to 256:

# %%
show.long_figure()

# %% [markdown]
# **Figure 3. The same from 16 to 256 tokens**, 12 policies at each length, after 7 updates. *a* The
# variance of the gradient. *b* The ratios themselves; dashed: the laws of figure 1, from the value
# at 16 tokens.

# %%
show.long_verdicts()

# %% [markdown]
# Here, too, the noise of GRPO relative to GSPO's is not shown to grow; its exponent is more likely
# below 0. The token's ratio is noisiest on *short* responses, and SAPO's noise does not depend on
# length at all. Panel b suggests why: at one learning rate, a token of a long response moves less
# in as many updates, 0.11 nats at 256 tokens where it is 0.40 at 16. What accumulates over the
# tokens meets a smaller step of each.
#
# ## From noise to collapse
#
# Three studies ask for the last step. Read their rules first, then the verdicts.
#
# **Experts** (E6): a mixture whose routes change under the updates, so that a token's ratio also
# contains the change of its experts. Replaying routes (R2) takes that part away.

# %%
show.verdicts("E6", [
  "ratios: R2 narrows GRPO's", "collapses: GRPO above GRPO with R2", "collapses: GRPO above GRPO, router frozen",
  "collapses: GRPO above GSPO", "collapses: GRPO above SAPO",
])

# %% [markdown]
# Routes are half of the variance of GRPO's ratios there, and taking them away does not save it: it
# falls as often with a frozen router. GSPO does not fall. But GSPO's band also lets the policy move
# less, and the study cannot tell *a better ratio* from *a smaller step*.
#
# **A sampler that rounds** (E24): the ratio of the first update is not 1 if the sampler computes in
# lower precision. Averaged over 64 tokens that error should vanish.

# %%
show.verdicts("E24", ["gspo needs no recomputation", "grpo needs no recomputation", "gspo clips more without recomputation"])

# %% [markdown]
# By the law of figure 1 it shrinks as $1/\sqrt{T}$. But so does the width of GSPO's band, which has
# to fit the ratio: relative to its band the error is as large as before, and GSPO falls to chance.
# An argument about the size of a noise is worth nothing without what it is compared with.
#
# **Length** (E25, `experiments/claims/long_responses`): Fibonacci numbers again, of 16, 64 and 256
# tokens, with 16 updates of each rollout batch. GSPO's lead over GRPO is not shown to grow (-2.7
# points, 95 % interval -7.9 to +2.6), and GRPO, whose clip binds on 0.3 % of the tokens at 256,
# collapses in none of 24 seeds there, or in four if an update has 8 responses, not 32. Without a
# ratio 11 do, and with SAPO's gate, too: at this rate neither keeps the policy near the samples.
#
# ## What we can conclude
#
# * The laws of figure 1 are arithmetic, and ratios follow them, but for a response's first tokens.
# * A clip's width belongs to a length. With the papers' constants on short responses, GSPO leaves
#   out most of the data.
# * The noise of the *gradient* under token ratios is real, a factor of two to three here; that it
#   grows with length is not shown. That of the product of all ratios grows.
# * That it is this noise that makes large models collapse is the papers' observation at sizes that
#   no laptop reaches. Small beds show collapses, and GSPO without them; not yet, that the ratio is
#   the reason, nor that length is.
#
# ## Exercises
#
# 1. Use another seed: `show.go_stale(seed=1)`. Which numbers of this lecture change by more than a
#    tenth, and which conclusions?
# 2. Compute by hand which band GSPO needs on 1,000 tokens if 40 times the paper's suits 64. (The
#    spread falls as $1/\sqrt{T}$, about: $40\sqrt{64/1000} \approx 10$ times.)
# 3. Add `("dapo", {})` and `("cispo", {})` to `LOSSES`. Predict first: which has less variance?
# 4. Measure your own objective: `python -m experiments.gradients --help` takes one by import path.
# 5. `along` in the study says how far a noisy step goes along the gradient of fresh responses. Why
#    can an objective with less variance be worse in it? (Think of a gradient that is always 0.)
#
# ## Papers
#
# GSPO [2507.18071](https://arxiv.org/abs/2507.18071) · GRPO
# [2402.03300](https://arxiv.org/abs/2402.03300) · SAPO
# [2511.20347](https://arxiv.org/abs/2511.20347) · PPO
# [1707.06347](https://arxiv.org/abs/1707.06347) · CISPO
# [2506.13585](https://arxiv.org/abs/2506.13585).
