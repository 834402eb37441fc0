"""Which tokens the next step computes: a pure function of the sequences, the blocks and the tokens that came back."""
