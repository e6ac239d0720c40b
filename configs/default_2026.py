"""The set of choices that open frameworks had come to by the end of 2026, in one config.

It is no paper's recipe. Read in the defaults and recipes of prime-rl, verl, SkyRL, AReaL,
open-instruct and TRL: an objective that keeps every token's gradient or masks by divergence, means
over prompts or tokens, no KL penalty, no division by the group's deviation, a head in float32,
rollouts that lag by some steps, and a correction for the sampler's mismatch. Every choice has its
own line here, so that one of them can be changed while the others stay.

  objective.name            "cispo": the importance weight is capped at 5, no token loses its
                            gradient; the alternative is --config.objective.name=dppo_tv
  objective.weights         "prompt_mean": every prompt weighs the same, whatever its lengths
  advantage.normalize_std   False: rewards minus the group's mean
  learner.skip_zero_advantages
                            True: groups of equal rewards are left out of the updates
  learner.old_logprobs      "learner": π_old is recomputed, so that mismatch and lag stay apart
  correction.tis            2: importance weights for the mismatch, capped
  rollout.staleness         4: rollouts are drawn by weights up to four steps old

There is no KL penalty, since CISPO's own default has none. The output head computes in float32,
since model.dtype is "float32" here; with "bfloat16" its products are only summed in float32.

Command: python -m jaxrl_llm.main --config=configs/default_2026.py

Hardware: 2 CPU cores.

Score: not yet measured.
"""

from configs import common


def get_config(arg: str = ""):
  """Returns the config; `arg` is "" (the laptop job) or "tiny" (a smoke run)."""
  config = common.laptop("cispo", arg)
  config.objective.weights = "prompt_mean"
  config.advantage.normalize_std = False
  config.learner.skip_zero_advantages = True
  config.learner.old_logprobs = "learner"
  config.correction.tis = 2.0
  config.rollout.staleness = 4
  return config
