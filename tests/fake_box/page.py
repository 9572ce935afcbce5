"""What docs/troubleshooting.md has of the preflight: its table of checks; and the catalogue of
cases, what is done to a box, and which check or part reports it.

    python -m tests.fake_box.page

cases.py has those that the preflight meets; `OTHERS` those that tests of the launchers, of two
nodes, of workers and of the engine show; `NOT_CAUGHT` those that nothing meets.
"""

from mindspeed_qerl.preflight.checks import TABLE
from tests.fake_box.cases import PREFLIGHT

# who reports it -> cases, each with the file of its test
OTHERS = {
    "Ray": {"another job holds 12 of 16 NPUs": "fake_box/test_checks.py"},
    "launcher": {
        "a second launcher, with another RAY_PORT too": "test_box.py",
        "a launcher was killed, and its training still runs": "test_box.py",
        "a launcher joins a Ray while another has the box": "test_box.py",
        "a foreign script that exits while it is sourced": "test_box.py",
        "RAY_ADDRESS where nobody listens": "test_box.py",
        "no flock and no setsid": "test_box.py",
        "BOX_WAIT=abc": "test_box.py",
        "NODE_ADDR that no interface has": "test_box.py",
        "a jemalloc that cannot be loaded": "test_box.py",
        "no NPUs at all": "test_launchers.py",
        "a config whose layout cannot exist": "test_launchers.py",
        "the checked conversion wrote nothing": "test_box.py",
        "the launcher below uv run": "test_box.py",
        "Ctrl-C, SIGTERM or SIGHUP while it checks, converts, starts Ray or trains": "test_box.py",
        "a training that ignores being told to stop": "test_box.py",
    },
    "launcher of two nodes": {
        "the second node is missing, killed, interrupted or cut off": "test_two_nodes.py",
        "NODE_ADDR where the other node does not reach it": "test_two_nodes.py",
        "another token, code or clock on the second node": "test_two_nodes.py",
        "16 dies are visible on both nodes": "test_two_nodes.py",
    },
    "engine": {"an import error in a worker, its task or the driver": "ascend/test_imports.py"},
}
NOT_CAUGHT = {
    "HCCL_EXEC_TIMEOUT (3600 s) above torch's watchdog (30 min)": "upstream's own value",
    "wrong answers of the pinned vllm-ascend in some layouts": "only the evaluation shows it",
    "vllm-ascend built for another chip": "the pin reads `_build_info.py` for a 310P only",
    "a die that is called OK and has ECC errors": "output for a 910C is unknown",
    "TLS on for the NPUs' links of one node only": "only the other node could tell",
    "a stale /etc/hccl_rootinfo.json": "not known whether a 910C refuses version 1.0",
    "a kernel older than 5.5": "no run was seen to stop by it",
    "pinned host memory above 200 GB in one piece": "what is offloaded is far below",
}


def checks():
    """The table for a reader: what each check asks, and what to do where it fails or warns."""
    lines = ["|check|asks|otherwise|", "|---|---|---|"]
    for row in TABLE:
        fix = row.fix.partition("\n")[0].partition("    #")[0]
        cells = (f"`{row.name}`", row.ask, f"`{fix}`" if fix else "")
        lines.append("|" + "|".join(cell.replace("|", r"\|") for cell in cells) + "|")
    return "\n".join(lines)


def catalogue():
    reported = {}
    for case in PREFLIGHT:
        reported.setdefault(case.check, []).append(case.done.removeprefix(f"{case.check}="))
    for part, cases in OTHERS.items():
        reported.setdefault(part, []).extend(cases)
    lines = [f"- `{check}`: {'; '.join(cases)}" for check, cases in reported.items()]
    return "\n".join([*lines, f"- not caught: {'; '.join(NOT_CAUGHT)}"])


if __name__ == "__main__":
    print(checks(), catalogue(), sep="\n\n")
