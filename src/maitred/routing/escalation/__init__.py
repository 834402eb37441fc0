"""Answers that fail a check, and go on to the next larger model: which checks there are, and what they find."""
