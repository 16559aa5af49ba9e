"""The entropy coder's package is loaded where no exception can meet it."""

import subprocess
import sys

SCRIPT = """
import signal, sys
import numpy.lib._version as version
from krnet.coding import coder

def interrupt(*given):
    signal.raise_signal(signal.SIGINT)
    return real(*given)

real, version.re.match = version.re.match, interrupt
try:
    coder.ans()
except KeyboardInterrupt:
    sys.exit(5)
"""


def test_a_stop_while_the_coder_is_loaded_is_a_stop():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 5 and "Panic" not in done.stderr, done.stderr[-900:]
