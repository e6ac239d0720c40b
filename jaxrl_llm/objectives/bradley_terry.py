"""Bradley-Terry loss of a reward model, on pairs of a chosen and a rejected response."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.objectives.settings import checked
from jaxrl_llm.segments import segment_sum, token_mean
from jaxrl_llm.types import Objective, PolicyOutputs, TokenTerm, TrainBatch


def pair_rewards(values: Float[Array, "B T"], batch: TrainBatch) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  """Returns the rewards of the chosen and the rejected response of each token's own pair.

  Segments 2k − 1 and 2k of a row are the chosen and the rejected sequence of pair k. `values` holds
  at each token the reward of a sequence that ends there.

  Example:
    >>> rows = jnp.array([[1, 1, 2, 2, 2, 0]])
    >>> batch = TrainBatch(rows, rows, rows, *3 * [jnp.zeros(rows.shape)])
    >>> [x[0, 0].item() for x in pair_rewards(jnp.array([[9.0, 3.0, 9.0, 9.0, 1.0, 9.0]]), batch)]
    [3.0, 1.0]
  """
  segments = batch.segments
  ends = (segments > 0) & (segments != jnp.pad(segments[:, 1:], ((0, 0), (0, 1))))
  # A pair's number is at most that of its segments, so both fit into the T + 1 bins of
  # `segment_sum`.
  of_pair, is_chosen = (segments + 1) // 2, segments % 2 == 1
  at_ends = lambda chosen: segment_sum(jnp.where(ends & (is_chosen == chosen), values, 0), of_pair)
  return at_ends(True), at_ends(False)


_RULES = {"center_coef": (lambda x: isinstance(x, int | float) and 0 <= x < math.inf, "a finite number >= 0")}


@partial(checked, rules=_RULES)
def bradley_terry(*, center_coef: float = 0.0) -> Objective:
  """Builds the Bradley-Terry objective: −log of the probability that the chosen response wins.

  P(chosen) = σ(r_c − r_r − m)
  L = −1/N · Σ log σ(r_c − r_r − m) + center_coef · (r_c + r_r)²

  Only one token of each pair has a weight, the end of its chosen sequence. There the batch has mask
  1 and, as `advantages`, the margin m.

  Args:
    center_coef: Weight of the term that keeps rewards around 0, which pairs alone leave open; 0.01
      is usual.

  Returns:
    The objective. It reads `PolicyOutputs.values`, each the reward of a sequence that ends with
    that token. Its metrics are `reward_model/accuracy` (1/2 for a tie), `reward_model/margin`
    (r_c − r_r), `reward_model/chosen`, `reward_model/rejected`, `reward_model/pair_loss` and, if
    `center_coef` is above 0, `reward_model/center_loss`.

  Raises:
    ValueError: If a setting is unknown or illegal.

  Example:
    >>> rows = jnp.array([[1, 1, 2, 2]])
    >>> mask = jnp.array([[0.0, 1.0, 0.0, 0.0]])
    >>> batch = TrainBatch(rows, rows, rows, mask, jnp.zeros(rows.shape), jnp.zeros(rows.shape))
    >>> outputs = PolicyOutputs(jnp.zeros(rows.shape), values=jnp.array([[0.0, 2.0, 0.0, 2.0]]))
    >>> loss, metrics = bradley_terry().token_loss(outputs, batch)
    >>> round(loss[0, 1].item(), 4), metrics["reward_model/accuracy"][0, 1].item()
    (0.6931, 0.5)

  References:
    R. A. Bradley and M. E. Terry, Rank Analysis of Incomplete Block Designs, Biometrika 39, 1952.
    Training language models to follow instructions with human feedback, arXiv:2203.02155, 2022,
      eq. 1.
    Llama 2: Open foundation and fine-tuned chat models, arXiv:2307.09288, 2023, eq. 2 (the margin).
    Helping or herding? Reward model ensembles mitigate but do not eliminate reward hacking,
      arXiv:2312.09244, 2023 (the centre).
  """

  def token_loss(outputs: PolicyOutputs, batch: TrainBatch) -> TokenTerm:
    chosen, rejected = pair_rewards(outputs.values.astype(jnp.promote_types(outputs.values.dtype, jnp.float32)), batch)
    difference = chosen - rejected
    loss = jax.nn.softplus(batch.advantages - difference)
    metrics = {
      "reward_model/accuracy": (1 + jnp.sign(difference)) / 2,
      "reward_model/margin": difference,
      "reward_model/chosen": chosen,
      "reward_model/rejected": rejected,
      "reward_model/pair_loss": loss,
    }
    if center_coef:
      center = center_coef * jnp.square(chosen + rejected)
      loss, metrics = loss + center, metrics | {"reward_model/center_loss": center}
    return loss, jax.lax.stop_gradient(metrics)

  return Objective(weigh=token_mean, token_loss=token_loss)
