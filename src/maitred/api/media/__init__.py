"""Requests that are passed on to other servers: embeddings, images, sound, moderations."""
