"""Lightning's contract, once for all strategies."""
