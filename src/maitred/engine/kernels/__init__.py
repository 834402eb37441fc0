"""The arithmetic of a step where plain torch is too slow, each kernel beside its plain-torch reference."""
