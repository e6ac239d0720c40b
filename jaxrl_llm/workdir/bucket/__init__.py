"""A workdir in a bucket: a local mirror in which the run works, and a publisher that sends it."""
