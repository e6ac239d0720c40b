"""Forecasts of which objective wins on a language model, from small runs on a laptop.

See README.md.
"""
