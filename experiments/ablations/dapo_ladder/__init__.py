"""DAPO's switches, added one by one in the order of the paper (E8 to E11)."""
