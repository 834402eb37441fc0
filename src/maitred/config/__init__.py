"""Configuration: layers of settings, their checks, and one typed tree of structs."""
