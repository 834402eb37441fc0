"""Engine processes of this machine and remote engines: starting, supervising, connecting and stopping them."""
