"""Runs, controls and figure of a real model that learns on two cores."""
