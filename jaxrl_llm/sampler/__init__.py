"""The JAX-native sampler: logits filters and the decode loop. It never sees a loss."""

from jaxrl_llm.sampler.decode import SampleFn, make_sampler
from jaxrl_llm.sampler.filters import FilterFn, make_filter

__all__ = ["FilterFn", "SampleFn", "make_filter", "make_sampler"]
