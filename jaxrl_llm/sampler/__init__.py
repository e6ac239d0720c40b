"""The JAX-native sampler: logits filters, decode loop and stop conditions. It never sees a loss."""

from jaxrl_llm.sampler.filters import FilterFn, make_filter
from jaxrl_llm.sampler.requests import RUNNING, Begun, Requests, begun, not_begun
from jaxrl_llm.sampler.sampler import SampleFn, default_blocks, make_sampler
from jaxrl_llm.sampler.stops import StopTable, make_stop_table
from jaxrl_llm.sampler.stream import Finished, StreamFn, gather, make_stream

__all__ = [
  "RUNNING", "Begun", "FilterFn", "Finished", "Requests", "SampleFn", "StopTable", "StreamFn", "begun", "default_blocks", "gather",
  "make_filter", "make_sampler", "make_stop_table", "make_stream", "not_begun",
]  # fmt: skip
