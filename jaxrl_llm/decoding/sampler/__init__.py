"""The JAX-native sampler: logits filters, decode loop and stop conditions. It never sees a loss."""

from jaxrl_llm.decoding.filters import FilterFn, make_filter
from jaxrl_llm.decoding.sampler.requests import Partial, Requests, no_partial, seeded, to_partial
from jaxrl_llm.decoding.sampler.sampler import SampleFn, default_blocks, make_sampler
from jaxrl_llm.decoding.stops import RUNNING, StopTable, make_stop_table

__all__ = [
  "RUNNING", "FilterFn", "Partial", "Requests", "SampleFn", "StopTable", "default_blocks", "make_filter", "make_sampler",
  "make_stop_table", "no_partial", "seeded", "to_partial",
]  # fmt: skip
