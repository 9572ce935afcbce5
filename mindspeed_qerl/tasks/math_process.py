"""Judges pairs of texts by Math-Verify in a process of its own: a line [gold, response] of JSON in,
a line "1" or "0" out, after a first line once all is imported.

A pair that takes more seconds of processor time than the argument ends the process: the signal's own action,
which, unlike a handler in Python, also ends a multiplication of a billion digits. A machine that is
busy changes no verdict.
"""

import json
import logging
import signal
import sys


def main() -> None:
    """Answers until there are no more lines."""
    from math_verify import parse, verify

    logging.disable()  # it warns that nothing limits its time
    print("ready", flush=True)
    for line in sys.stdin:
        gold, response = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, float(sys.argv[1]))
        expected = parse(gold, parsing_timeout=None)
        given = parse(response, parsing_timeout=None)
        print(int(verify(expected, given, timeout_seconds=None)), flush=True)


if __name__ == "__main__":
    main()
