"""Servers, models and stand-ins that tests share; nothing here is a test."""
