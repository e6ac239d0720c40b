"""Rematerialisation policies: what the backward pass keeps of each block.

A policy saves memory at the cost of a second forward pass.
"""

from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_policies

from jaxrl_llm.messages import Problem, did_you_mean

NAMED = ("linear", "attention")
"""Names that `linear` and the attention kernels give to their results.

Their custom derivatives hide the matrix products from a policy.
"""

VISITS = "visits"
"""Name that attention gives to the blocks that its kernels visit.

They are the same in every layer and small, and take some twenty small kernels to list: every policy
keeps them.
"""

POLICIES: dict[str, Callable | None] = {
  "none": None,
  "full": checkpoint_policies.save_only_these_names(VISITS),
  # The operations of attention grow with the square of the row, what it returns only with the row.
  "attention": checkpoint_policies.save_only_these_names("attention", VISITS),
  "dots": checkpoint_policies.save_from_both_policies(
    checkpoint_policies.dots_with_no_batch_dims_saveable, checkpoint_policies.save_only_these_names(*NAMED, VISITS)
  ),
  "offload": checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[VISITS], names_which_can_be_offloaded=list(NAMED), offload_src="device", offload_dst="pinned_host"
  ),
}
"""Policies of `jax.checkpoint` by name. None means no checkpoint: everything is kept."""

AUTO = "auto"
"""Name of the first of `CHEAPEST` with which a run fits its devices."""

CHEAPEST = ("none", "dots", "attention", "full")
"""Policies from the least recomputed to the least kept."""


def rematerialised(step: Callable, policy: str) -> Callable:
  """Wraps the step of a scan so that its backward pass recomputes what the policy does not keep.

  `policy` is a key of `POLICIES`.
  """
  # In a scan the two passes are separate loops, which XLA cannot merge, so no barrier is needed.
  return step if policy == "none" else jax.checkpoint(step, prevent_cse=False, policy=POLICIES[policy])


def check_policy(name: str) -> None:
  """Rejects a name that is neither "auto" nor a key of `POLICIES`.

  Raises:
    ValueError: If the name is unknown. One line, with the fix.

  Example:
    >>> check_policy("ful")
    Traceback (most recent call last):
    ...
    ValueError: model.remat: found 'ful', expected one of auto, none, ...; did you mean 'full'?
  """
  names = (AUTO, *POLICIES)
  if name in names:
    return
  old = {True: "full", False: "none", "True": "full", "False": "none", "true": "full", "false": "none"}
  hint = f"; did you mean {old[name]!r}?" if name in old else did_you_mean(name, names)
  raise ValueError(Problem("model.remat", repr(name), f"one of {', '.join(names)}{hint}"))
