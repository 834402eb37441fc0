"""Whether a replica may be sent to, with which weight, and why not. Pure: the clock and chance are arguments."""
