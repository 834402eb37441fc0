"""``python -m tests.support.suite.given_code CODE …``: runs code as ``python -c`` does, but may be forked."""

import sys

if __name__ == "__main__":
    _, code, *rest = sys.argv
    sys.argv[:] = ["-c", *rest]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
