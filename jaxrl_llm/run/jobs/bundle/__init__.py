"""A step in a box: all that the updates of one RL step read, in one file, and their repetition."""
