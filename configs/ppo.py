"""PPO with a separate critic: GAE advantages, clipped ratios, a clipped value loss.

Paper: Proximal policy optimization algorithms, arXiv:1707.06347, 2017; GAE, arXiv:1506.02438, 2015.

The critic starts from the policy's trunk after the warm start, with a value head of zeros, and
trains alone for the first steps (VAPO, arXiv:2504.05118). γ = λ = 1 for policy and critic, which
Open-Reasoner-Zero found stable for language models. Advantages are whitened over the rollout batch.

Command: python -m jaxrl_llm.main --config=configs/ppo.py

Hardware: 2 CPU cores.

Score: held-out avg@4 46.3% after the warm start, 95.2% at the end (seed 0); 333 s. The critic
explains little of the variance of the returns here (see experiments/LOG.md).
"""

from configs import common


def get_config(arg: str = ""):
  """Returns the config; `arg` is "" (the laptop job) or "tiny" (a smoke run)."""
  config = common.laptop("ppo", arg)
  config.advantage.estimator = "gae"
  config.advantage.whiten = True
  config.critic.init = "policy"
  config.critic.learning_rate = 5e-4
  config.critic.value_warmup_steps = 1 if arg == "tiny" else 2
  return config
