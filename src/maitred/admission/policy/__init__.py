"""Pure rules: the limits that apply to a request, and the text of a refusal."""
