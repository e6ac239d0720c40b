"""Who did it: the parts of an update that come of each group, response and token."""
