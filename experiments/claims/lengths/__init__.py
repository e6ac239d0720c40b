"""How the weights of tokens move the length of responses: Dr.

GRPO's claim (E18) and LUSPO's (E21). See README.md.
"""
