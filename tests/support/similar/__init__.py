"""What stands for an encoder in tests of similar questions."""
