"""Conversations that branch: how many tokens of their prompts are computed, and what they draw."""

import pytest

from jaxrl_llm.decoding.engine.requests import Request
from tests.decoding.engine.engines import assert_as_the_model, complete, prompt

BRANCHES, TURNS, ROOT, DRAWN = 3, 3, 21, 6
LEAVES, NODES = 27, 39


def replies(turn, branch):
  """Returns what stands between two turns: its first tokens are the same in all branches."""
  return [*prompt(100 + turn, 3), *prompt(1000 + 10 * turn + branch, 4)]


class Prefixes:
  """A trie of tokens, which counts those that were not in it."""

  def __init__(self):
    self._root = {}

  def add(self, tokens):
    """Adds the prefixes of a text; returns how many of them are new."""
    node, new = self._root, 0
    for token in tokens:
      new += token not in node
      node = node.setdefault(token, {})
    return new


def grown(engine, *, at_once, of_one):
  """Draws a tree: each text is continued by several requests, turn after turn.

  Args:
    engine: Engine.
    at_once: Whether all requests of a turn are asked for at once, or those of one text.
    of_one: Whether all requests have one owner, or each its own.

  Returns:
    Requests with their completions, in lists of those that continue one text, and the number of
    prompt tokens that are behind another prefix than all tokens that such requests may read.
  """
  known, drawn, needed = Prefixes(), [], 0

  def ask(texts, turn):
    nonlocal needed
    said = [[*text, *replies(turn, i)] if turn else text for text in texts for i in range(BRANCHES)]
    first = BRANCHES * len(drawn)
    asked = [Request(text, DRAWN, seed=i, owner="" if of_one else str(i)) for i, text in enumerate(said, first)]
    # The last token of a prompt is fed by the first step of decoding.
    needed += sum(known.add(request.tokens[:-1]) for request in asked)
    both = list(zip(asked, complete(engine, *asked), strict=True))
    if of_one:
      for request, result in both:
        known.add([*request.tokens, *result.tokens[:-1]])
    drawn.extend(both[i : i + BRANCHES] for i in range(0, len(both), BRANCHES))
    return [[*request.tokens, *result.tokens] for request, result in both]

  def descend(texts, turn):
    if turn < TURNS:
      further = ask(texts, turn)
      for part in [further] if at_once else [[text] for text in further]:
        descend(part, turn + 1)

  descend([prompt(0, ROOT)], 0)
  return drawn, needed


def computed(drawn):
  """Returns the number of prompt tokens that passed through the model, but for each last one."""
  both = [pair for of_text in drawn for pair in of_text]
  assert all(x.cached_tokens + x.computed_tokens == len(request.tokens) - 1 + DRAWN for request, x in both)
  return sum(x.computed_tokens - DRAWN for _, x in both)


@pytest.mark.parametrize(("rows", "of_one"), [(LEAVES, True), (NODES, False)])
@pytest.mark.parametrize("at_once", [True, False])
def test_each_prefix_is_computed_once(engine_of, rows, of_one, at_once):
  """With a row for each leaf, or for each node if what a request draws is not read by others."""
  drawn, needed = grown(engine_of(slots=rows), at_once=at_once, of_one=of_one)
  assert computed(drawn) == needed < 0.2 * sum(len(request.tokens) for of_text in drawn for request, _ in of_text)
  assert len({tuple(x.tokens) for of_text in drawn for _, x in of_text}) == NODES
  for request, result in drawn[-1]:
    assert_as_the_model(request, result)


@pytest.mark.parametrize("at_once", [True, False])
def test_few_rows_compute_no_more_than_what_each_text_adds_to_the_root(engine_of, at_once):
  """The row of a text may have gone to others before the text is continued.

  All rows hold the root of the tree, which is thus computed once. Requests that continue one text
  get rows one after the other, so that each can read what the one before has in common with it.
  """
  drawn, needed = grown(engine_of(slots=3), at_once=at_once, of_one=True)
  most = ROOT - 1
  for of_text in drawn[1:]:
    own = Prefixes()
    most += sum(own.add(request.tokens[:-1]) for request, _ in of_text) - ROOT
  assert needed < computed(drawn) <= most
