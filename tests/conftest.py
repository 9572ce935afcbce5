"""For all tests: the longest files first, since `make test` divides files among two processes, and
none should be left for the end; Ctrl-C; and threads that wait without spinning.
"""

import os
import signal

LONGEST = (
    "test_run",
    "test_launchers",
    "test_sweep",
    "test_megatron",
    "test_rehearsal",
    "test_box",
    "test_rollout",
    "test_quantized",
)

# Read when torch is loaded. Two processes share the cores: threads that spin for one that another
# program has taken make some tests tenfold longer.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_configure():
    """What a shell starts in the background ignores Ctrl-C, and so would all programs that are
    interrupted here.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    def place(item):
        name = item.path.stem
        return LONGEST.index(name) if name in LONGEST else len(LONGEST)

    items.sort(key=place)
