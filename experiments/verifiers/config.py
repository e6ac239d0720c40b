"""Environments of the package verifiers, as they are, for a policy that reads bytes.

Command: python -m jaxrl_llm.main --config=experiments/verifiers/config.py:reverse_text

Hardware: 2 CPU cores.

`reverse_text` reads the texts that `python -m experiments.verifiers.words runs/verifiers/words`
writes. `scratchpad` needs no data. `alphabet_sort` and `hangman` load theirs from a hub.

Score: held-out reward 0.58 (0.52 to 0.63) to 0.75 (0.68 to 0.82) for `reverse_text` and 0.21 (0.18
to 0.25) to 0.27 (0.22 to 0.32) for `hangman`, seed 0. Mean training reward 0.61 to 0.86 for
`scratchpad` and 0.81 to 0.88 for `alphabet_sort`, which do not carry over to new words and names.
"""

import json

from configs import common

ENVIRONMENTS = {
  "reverse_text": dict(
    id="reverse_text", taskset={"dataset_name": "runs/verifiers/words"}, size=320, tokens=48, turns=1,
    warm=160, prompts=32, updates=4, steps=40, learning_rate=2e-4, eval_prompts=32,
  ),  # fmt: skip
  "scratchpad": dict(id="scratchpad", taskset={}, size=20, tokens=136, turns=3, lessons=16, warm=240, steps=24),
  "alphabet_sort": dict(
    id="alphabet_sort", taskset={"min_turns": 2, "max_turns": 2, "max_names_per_turn": 1}, size=24, tokens=560, turns=2,
    lessons=16, warm=200, steps=24,
  ),  # fmt: skip
  "hangman": dict(
    id="textarena", taskset={"game": "Hangman-v0"}, size=320, tokens=1400, turns=12, preset="nano", warm=40, prompts=16, steps=20,
    eval_prompts=32,
  ),  # fmt: skip
}
"""Environments by argument, with the settings of their data, and the sizes of a run."""


def get_config(arg: str = "reverse_text"):
  """Returns the config; `arg` is a key of `ENVIRONMENTS`."""
  config, own = common.laptop("grpo", ""), ENVIRONMENTS[arg]
  config.num_steps = own.get("steps", 16)
  config.task.name, config.task.levels, config.task.size = "environment", None, own["size"]
  config.environment.name = f"verifiers:{own['id']}"
  config.environment.settings = json.dumps({"taskset": own["taskset"]})
  config.environment.teacher = f"experiments.verifiers.teachers:{arg}"
  config.environment.lessons, config.environment.max_turns = own.get("lessons"), own["turns"]
  config.warm_start.num_steps, config.warm_start.batch_size = own.get("warm", 48), 32
  config.warm_start.row_buckets = None
  config.model.preset = own.get("preset", "tiny")
  if config.model.preset == "nano":
    config.warm_start.learning_rate = 1e-2
  config.learner.learning_rate = own.get("learning_rate", 2e-3 if config.model.preset == "nano" else 3e-4)
  config.rollout.num_prompts, config.rollout.group_size = own.get("prompts", 8), 8
  config.rollout.max_new_tokens = own["tokens"]
  config.rollout.prompt_buckets = config.learner.row_tokens = config.learner.row_buckets = None
  config.learner.updates_per_rollout = own.get("updates", 2)
  config.eval.every, config.eval.num_prompts, config.eval.samples = config.num_steps, own.get("eval_prompts", 16), 4
  return config
