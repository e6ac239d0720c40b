"""Drawing tokens with a model: the sampler, the decoding engine, and engines in other processes."""
