"""What the backward pass keeps of each block, by name: the trade of memory for a second forward pass."""

from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_policies

from jaxrl_llm.messages import Problem, did_you_mean

NAMED = ("linear", "attention")
"""Results that `linear` and the attention kernels give a name: their own rules of differentiation hide the products from a policy."""

POLICIES: dict[str, Callable | None] = {
  "none": None,
  "full": checkpoint_policies.nothing_saveable,
  "dots": checkpoint_policies.save_from_both_policies(
    checkpoint_policies.dots_with_no_batch_dims_saveable, checkpoint_policies.save_only_these_names(*NAMED)
  ),
  "offload": checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=list(NAMED), offload_src="device", offload_dst="pinned_host"
  ),
}
"""What `jax.checkpoint` may keep of a block. None: no checkpoint at all, everything is kept."""


def rematerialised(step: Callable, policy: str) -> Callable:
  """A step of a scan whose backward pass computes again what the policy, a key of `POLICIES`, does not keep."""
  # Inside a scan the two passes lie in two loops, which nothing can merge: no barrier against it is needed.
  return step if policy == "none" else jax.checkpoint(step, prevent_cse=False, policy=POLICIES[policy])


def check_policy(name: str) -> None:
  """Refuses what is no key of `POLICIES`.

  Raises:
    ValueError: one line, with the fix.

  Example:
    >>> check_policy("ful")
    Traceback (most recent call last):
    ...
    ValueError: model.remat: found 'ful', expected one of none, full, dots, offload; did you mean 'full'?
  """
  if name in POLICIES:
    return
  old = {True: "full", False: "none", "True": "full", "False": "none", "true": "full", "false": "none"}
  hint = f"; did you mean {old[name]!r}?" if name in old else did_you_mean(name, POLICIES)
  raise ValueError(Problem("model.remat", repr(name), f"one of {', '.join(POLICIES)}{hint}"))
