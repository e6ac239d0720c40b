"""The sampler as a service: requests arrive at any time and share one decoding loop."""
