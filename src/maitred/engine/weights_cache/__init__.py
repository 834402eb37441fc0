"""Cache of converted weights: written to a file once, and mapped by all engines that run the model."""
