"""Advantages from rewards, as pure functions of unpacked sequences.

A batch has N sequences, G consecutive ones per prompt, with R response slots each.

| method | advantages |
| --- | --- |
| GRPO, Dr. GRPO, GSPO, SAPO | `group_advantages` |
| RLOO, RLOO-N | `leave_one_out_advantages` |
| MaxRL | `maxrl_advantages` |
| Lite PPO, ScaleRL | `batch_scaled_advantages` |
| Pass@k Training | `pass_at_k_advantages` |
| OPO | `opo_advantages` |
| OTB | `otb_advantages` |
| GDPO | `per_reward_advantages` |
| GRPO with process supervision | `step_advantages` |
| GTPO | `gtpo_advantages` |
| RAE, for self-play | `role_advantages` |
| GiGPO, for agents | `gigpo_advantages` |
| hierarchical GRPO, for self-play | `hierarchical_advantages` |
| SPO, for single responses | `spo_advantages` |
| REINFORCE++ | `whiten(returns_to_go(token_rewards(rewards, mask, kl, kl_coef), mask), mask)` |
| PPO | `generalized_advantages(token_rewards(rewards, mask, kl, kl_coef), values, mask)`, then `whiten` |
| VAPO | as for PPO, with `lam=length_adaptive_lambda(mask)` |

All functions compute in at least float32, and in float64 if an input is float64. They work under
jit and never read values outside the mask. A NaN inside the mask reaches the result.
"""

from jaxrl_llm.advantages.beliefs import FIRST_BELIEF, spo_advantages
from jaxrl_llm.advantages.entropy import gtpo_advantages
from jaxrl_llm.advantages.group import group_advantages, leave_one_out_advantages, pass_at_k_advantages, per_reward_advantages
from jaxrl_llm.advantages.optimal import opo_advantages, otb_advantages
from jaxrl_llm.advantages.roles import role_advantages
from jaxrl_llm.advantages.scales import batch_scaled_advantages, maxrl_advantages
from jaxrl_llm.advantages.states import gigpo_advantages, hierarchical_advantages, state_advantages, steps_per_state
from jaxrl_llm.advantages.statistics import explained_variance, whiten
from jaxrl_llm.advantages.temporal import generalized_advantages, length_adaptive_lambda, returns_to_go, step_advantages, token_rewards

__all__ = [
  "FIRST_BELIEF",
  "batch_scaled_advantages",
  "explained_variance",
  "generalized_advantages",
  "gigpo_advantages",
  "group_advantages",
  "gtpo_advantages",
  "hierarchical_advantages",
  "leave_one_out_advantages",
  "length_adaptive_lambda",
  "maxrl_advantages",
  "opo_advantages",
  "otb_advantages",
  "pass_at_k_advantages",
  "per_reward_advantages",
  "returns_to_go",
  "role_advantages",
  "spo_advantages",
  "state_advantages",
  "step_advantages",
  "steps_per_state",
  "token_rewards",
  "whiten",
]
