"""What holds a server up: pure rules over what it shows of itself during a few seconds."""
