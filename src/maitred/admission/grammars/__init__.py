"""Grammar validation: checks a constraint on the answer before anything is charged."""
