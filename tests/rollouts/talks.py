"""Conversations for tests: a small model, an environment that counts, and its prompts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models import make_model, preset
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.rollouts.environments import Environment, Reply

TOKENIZER, GROUP, BUDGET = ByteTokenizer(), 3, 24
STOPS = (*range(60), TOKENIZER.eos_id)  # Many, so that a random policy ends its turns.
EXAMPLES = [{"prompt": "12", "answer": "3"}, {"prompt": "7", "answer": "4"}]


def told(number, turn):
  """Replies with a few bytes, different each time, and ends after the third turn."""
  return number + 1, Reply((100 + number,) * (number + 1), reward=float(number), done=number == 2)


COUNTING = Environment(reset=lambda row: 0, step=told)


@functools.cache
def built():
  model = make_model(preset("nano", vocab_size=TOKENIZER.vocab_size))
  rng = np.random.default_rng(0)
  scale = lambda path, p: jnp.asarray((path[-1].key == "scale") + 0.2 * rng.standard_normal(p.shape), jnp.float32)
  return model, jax.tree_util.tree_map_with_path(scale, jax.eval_shape(model.init, jax.random.key(0)))


def logprobs_of(rollouts, row):
  """Returns the log-probability of every token of a response, from one forward pass."""
  _, params = built()
  prompt = rollouts.prompts[row][rollouts.prompt_mask[row]]
  real = np.concatenate([prompt, rollouts.tokens[row][rollouts.mask[row]]])
  # One shape for all responses: a causal model does not see the padding behind them.
  ids = np.zeros((1, rollouts.prompts.shape[1] + rollouts.tokens.shape[1]), np.int32)
  ids[0, : len(real)] = real
  logprobs = np.asarray(jax.nn.log_softmax(whole_logits()(params, ids, np.arange(ids.shape[1])[None], np.ones_like(ids))[0]))
  return np.array([logprobs[t - 1, real[t]] for t in range(len(prompt), len(real))])


@functools.cache
def whole_logits():
  return jax.jit(built()[0].logits)
