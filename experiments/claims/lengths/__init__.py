"""Effect of the weights of tokens on the length of responses.

GRPO's claim (E18) and LUSPO's (E21). See README.md.
"""
