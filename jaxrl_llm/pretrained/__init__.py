"""Published checkpoints apart from their weights: location, header, tokenizer and chat template.

Nothing here needs JAX.
"""
