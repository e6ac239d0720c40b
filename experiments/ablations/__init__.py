"""Ablations, one folder for each question: script, rules, results and figures."""
