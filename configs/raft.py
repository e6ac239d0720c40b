"""RAFT: rejection-sampling fine-tuning, which imitates the right samples and drops the wrong ones.

Paper: RAFT: reward ranked finetuning for generative foundation model alignment, arXiv:2304.06767,
2023. Compared with GRPO in: A minimalist approach to LLM reasoning, from rejection sampling to
Reinforce, arXiv:2504.11343, 2025.

The advantage of every token is the reward of its response, without a baseline, and there is no
ratio. With rewards of 0 and 1 the gradient is that of the log-likelihood of the right responses.
The other objectives add a group's baseline and the wrong responses.

Command: python -m jaxrl_llm.main --config=configs/raft.py

Hardware: 2 CPU cores.

Score: `:smollm2`, seeds 1, 2 and 3, rise from 15.6%, 12.5% and 18.0% untrained to 92.2%, 85.9% and
93.0% of 128 held-out problems. The laptop job: not yet measured.
"""

from configs import common


def get_config(arg: str = ""):
  """Returns the config of the experiment.

  Args:
    arg: "" (the laptop job), "tiny" (a smoke run), or "smollm2" or another key of `common.SMOLLM2`
      (a real model).
  """
  config = common.laptop("reinforce", arg, variants=tuple(common.SMOLLM2))
  config.objective.weights = "sequence_mean"
  config.advantage.estimator = "returns"
  return config
