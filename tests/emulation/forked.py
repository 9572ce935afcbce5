"""Code in a process of its own, forked from one that has imported what it needs: quicker than an
interpreter each.
"""

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

SERVER = """
import json, os, sys, traceback
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the code prints (gloo does) is no answer
names = {}
exec(sys.argv[1], names)
for line in sys.stdin:
    if not os.fork():
        said = "done"
        try:
            exec(json.loads(line), names)
        except BaseException:
            said = traceback.format_exc()
        print(json.dumps(said), file=answers, flush=True)
        os._exit(0)
    if os.wait()[1]:
        print(json.dumps("died"), file=answers, flush=True)
"""


@contextmanager
def forking(prelude: str, env: Mapping[str, str] | None = None) -> Iterator[Callable[[str], None]]:
    """A function that runs code after `prelude`, which runs once; it fails with the code's
    traceback.
    """
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, prelude],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env,
    ) as process:

        def run(code: str) -> None:
            print(json.dumps(textwrap.dedent(code)), file=process.stdin, flush=True)
            said = json.loads(process.stdout.readline())
            assert said == "done", said

        yield run
        process.stdin.close()
