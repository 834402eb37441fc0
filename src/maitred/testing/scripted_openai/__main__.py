"""Command line ``python -m maitred.testing.scripted_openai``."""

import sys

from maitred.testing.scripted_openai.process import main

main(sys.argv[1:])
