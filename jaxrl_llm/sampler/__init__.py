"""The JAX-native sampler: logits filters, decode loop and stop conditions. It never sees a loss."""

from jaxrl_llm.sampler.filters import FilterFn, make_filter
from jaxrl_llm.sampler.requests import RUNNING, Partial, Requests, no_partial, to_partial
from jaxrl_llm.sampler.sampler import SampleFn, default_blocks, make_sampler
from jaxrl_llm.sampler.stops import StopTable, make_stop_table
from jaxrl_llm.sampler.stream import Finished, StreamFn, collect_finished, make_stream

__all__ = [
  "RUNNING", "FilterFn", "Finished", "Partial", "Requests", "SampleFn", "StopTable", "StreamFn", "collect_finished", "default_blocks",
  "make_filter", "make_sampler", "make_stop_table", "make_stream", "no_partial", "to_partial",
]  # fmt: skip
