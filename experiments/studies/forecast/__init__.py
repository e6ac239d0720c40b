"""Whether small runs on a laptop forecast which objective wins on a language model.

See README.md.
"""
