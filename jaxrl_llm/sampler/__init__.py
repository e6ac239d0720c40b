"""The JAX-native sampler: logits filters, the decode loop, what ends a response. It never sees a loss."""

from jaxrl_llm.sampler.decode import SampleFn, default_blocks, make_sampler
from jaxrl_llm.sampler.filters import FilterFn, make_filter
from jaxrl_llm.sampler.requests import RUNNING, Begun, Requests, begun
from jaxrl_llm.sampler.stops import StopTable, make_stop_table

__all__ = [
  "RUNNING", "Begun", "FilterFn", "Requests", "SampleFn", "StopTable", "begun", "default_blocks", "make_filter", "make_sampler", "make_stop_table",
]  # fmt: skip
