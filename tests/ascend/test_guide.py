"""docs/ascend.md typed from its first command to its last, in one shell: every file and folder that
a command names is in this repository or was made by a command before it. What would install,
convert or train only looks at its paths. docs/troubleshooting.md goes by what is really printed,
and by the timeouts that are really set.
"""

import re
import shlex
import subprocess

from mindspeed_qerl.ascend.limits import npu_environment
from mindspeed_qerl.recipe.types import Npu
from tests import ROOT

# What the commands take from the checkouts that they clone (paths of upstream at the pins).
UPSTREAM = [
    "vllm-ascend/requirements.txt",
    "vllm-ascend/setup.py",
    "MindSpeed/requirements.txt",
    "MindSpeed-RL/requirements.txt",
    "MindSpeed-LLM/convert_ckpt.py",
    "MindSpeed-LLM/convert_ckpt_v2.py",
    "Megatron-LM/megatron/core/datasets/Makefile",
]
SHELL = """
fault() { echo "in ${PWD##*/}: $*" >> "$faults"; }
needs() { [[ -e $1 ]] || fault "no $1"; }
cd() { builtin cd "$1" 2> /dev/null || fault "cd $1"; }
git() {
    [[ $1 == clone ]] || return 0
    local made=${2##*/} file
    mkdir "${made%.git}"
    for file in $upstream; do
        [[ $file != "${made%.git}"/* ]] || { mkdir -p "${file%/*}"; touch "$file"; }
    done
}
pip() {
    local words="$*"
    [[ $words != *' -r '* ]] || needs "${words##* -r }"
    [[ $words != *' -e .' ]] || needs setup.py
}
python() {
    local word
    [[ $1 != *.py ]] || needs "$1"
    for word; do
        [[ $word != ../* && ($1 != *check_upstream.py || $word == -*) ]] || needs "$word"  # its values are folders
    done
}
bash() { needs "$1"; }
make() { [[ $1 != -C ]] || needs "$2/Makefile"; }
ray() { :; }
source() { :; }
apt() { :; }
ulimit() { :; }
"""


def commands(page):
    """The blocks of commands, and the commands that stand before their output."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return "\n".join(
        text
        if kind == "bash"
        else "\n".join(re.findall(r"^\$ ((?:.*\\\n)*.*)$", text, re.MULTILINE))
        for kind, text in blocks
    )


def walk(page, folder):
    """Faults of the commands of `page`, typed in a folder that has this repository and nothing
    else.
    """
    (folder / "mindspeed_qerl").mkdir(parents=True)
    for entry in ROOT.iterdir():
        (folder / "mindspeed_qerl" / entry.name).symlink_to(entry)
    faults = folder / "faults"
    faults.touch()
    settings = f"faults={shlex.quote(str(faults))}\nupstream={shlex.quote(' '.join(UPSTREAM))}\n"
    done = subprocess.run(
        ["bash", "-c", settings + SHELL + commands(page)],
        cwd=folder,
        check=False,
        text=True,
        capture_output=True,
    )
    assert not done.stderr, done.stderr
    return faults.read_text().splitlines()


def test_every_path_is_there_when_it_is_named(tmp_path):
    page = (ROOT / "docs" / "ascend.md").read_text()
    assert len(re.findall(r"\b(?:python|bash) \S+\.(?:py|sh)", commands(page))) > 15
    assert walk(page, tmp_path / "page") == []
    # a page that forgets where it is
    lost = walk(page.replace("cd ../MindSpeed-LLM", "cd MindSpeed-LLM"), tmp_path / "lost")
    assert (
        lost[0] == "in mindspeed_qerl: cd MindSpeed-LLM"
        and "in mindspeed_qerl: no convert_ckpt.py" in lost
    )


def test_troubleshooting_has_our_lines_and_timeouts():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    files = [*(ROOT / "examples" / "grpo").glob("*.sh")]
    for room in ("ascend", "preflight", "runs"):
        files += (ROOT / "mindspeed_qerl" / room).glob("*.py")
    sources = "\n".join(file.read_text() for file in files)
    hangs = page[page.index("\n## Hangs\n") : page.index("\n## Wrong numbers\n")]
    phases = re.findall(r"`([\w ]+) \.\.\.`", hangs)
    assert len(phases) == 5 and all(f'phase("{phase}")' in sources for phase in phases)
    for line in (
        "asking npu-smi, CANN and Ray, each for at most",
        "the base weights are converted",
        "GSM8K is converted to text",
        "hangs in the driver and cannot be killed; it keeps the box",
        "waiting for it to end, at most",
        "this box is taken",
        "its launcher has gone",
    ):
        assert line in page and line in sources, line
    timeouts = dict(re.findall(r"^\| `([\w.]+)` \| (\d+) s", page, re.MULTILINE))
    ours = npu_environment() | {"npu.peer_timeout": str(Npu.peer_timeout)}
    ours |= dict(re.findall(r"\b(\w+_TIMEOUT)=\$\{\1:-(\d+)\}", sources))
    assert timeouts == {name: ours[name] for name in timeouts} and len(timeouts) == 5
