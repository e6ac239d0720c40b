"""The Tinker API: training and sampling calls of the `tinker` SDK, on this machine's devices."""
