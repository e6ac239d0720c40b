"""Programs as JAX traces them, for tests of what is in them."""

from collections.abc import Iterator

import jax.extend


def equations(jaxpr) -> Iterator:
  """Yields all equations of a program, those of the programs inside it too."""
  for equation in jaxpr.eqns:
    yield equation
    for inner in jax.extend.core.jaxprs_in_params(equation.params):
      yield from equations(inner)
