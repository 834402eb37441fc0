"""Routes: map a request name to its allowed pools in order, with reasons for the excluded pools."""
