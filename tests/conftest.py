"""What every test may rely on."""

import os
import signal

# No test may reach for a model hub; its client reads this when it is imported, in children too.
os.environ["HF_HUB_OFFLINE"] = "1"

# A shell that starts a job in the background lets it ignore Ctrl-C, and children inherit that. The tests that press
# Ctrl-C on a child need it to listen, however they were started themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
