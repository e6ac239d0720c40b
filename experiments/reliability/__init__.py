"""Tests of whether a run can be lost: kills at random and at chosen places, and their effects."""
