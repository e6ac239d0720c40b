"""How much imprecision of old log-probabilities each objective tolerates, by bed (E23)."""
