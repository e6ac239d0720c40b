"""From words to values: the command line, the fields of a config, their checks, and what a config names."""
