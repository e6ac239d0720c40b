"""jaxrl_llm: reinforcement learning of language models in JAX.

Importing the package imports nothing else.
"""

__version__ = "0.1.0"
