"""maitred serves large language models to thousands of concurrent users on the accelerators you have."""

__version__ = "0.1.0"
