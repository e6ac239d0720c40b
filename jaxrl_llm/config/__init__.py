"""Configs: the command line, the fields, their checks, and the objects that a config names."""
