"""An engine that says what a function makes of the text so far."""

from concurrent.futures import Future

import numpy as np

from jaxrl_llm.decoding.engine.requests import Decoded, EngineLimits, Handle, Piece


class Scripted:
  """The engine, which notes its requests.

  Args:
    say: Function from the text so far to the next turn, without its end.
    tokenizer: Tokenizer of both.
  """

  limits = EngineLimits(200_000, 64)

  def __init__(self, say, tokenizer):
    self.say, self.tokenizer, self.requests = say, tokenizer, []

  def submit(self, request, on_piece=None):
    self.requests.append(request)
    before = request.tokens[: len(request.tokens) - request.drawn]
    ids = [*self.tokenizer.encode(self.say(self.tokenizer.decode(before))), self.tokenizer.eos_id]
    logprobs = np.random.default_rng(request.seed % 2**32).uniform(-3, 0, len(ids)).tolist()[request.drawn :]
    kept, future = ids[request.drawn :][: request.max_tokens], Future()
    ends = "stop" if len(kept) == len(ids) - request.drawn else "length"
    if on_piece is not None:
      on_piece(Piece(kept, logprobs[: len(kept)]))
    future.set_result(Decoded(kept, logprobs[: len(kept)], ends, 1, len(kept), 0))
    return Handle(future, lambda: None)

  def update(self, params, version):
    pass

  def close(self):
    pass
