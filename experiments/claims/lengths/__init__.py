"""Effect of token weights on the length of responses: claims of Dr. GRPO (E18) and LUSPO (E21)."""
