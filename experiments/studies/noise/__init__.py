"""Study "noise": how much noise ratios and gates leave in the gradient of stale data, by length."""
