"""The command that evaluates a checkpoint: `python -m jaxrl_llm.evaluate`."""
