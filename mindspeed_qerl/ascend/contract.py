"""Does the upstream that is there fit the engine? The promises it must keep, held against its sources without importing them.

    findings = check({"mindspeed_rl": Path("MindSpeed-RL"), ...})     # tools/check_upstream.py prints them
    require(check(installed_roots()))                                # the engine, before it starts anything

The promises: promises.py. Needs nothing but Python.
"""

import importlib.util
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mindspeed_qerl.ascend.clauses import BROKEN, NOT_CHECKED, Clause, Finding, examine
from mindspeed_qerl.ascend.promises import CONTRACT, UPSTREAM_VERIFIERS

__all__ = ["CONTRACT", "PINS", "UPSTREAM_VERIFIERS", "Pin", "UpstreamMismatch", "check", "commit_of", "installed_roots",
           "repository", "require"]


@dataclass(frozen=True)
class Pin:
    """The commit of one repository that the contract was written for, and the branch or tag it is on."""

    title: str
    commit: str
    on: str


# Keys are the names of the packages.
PINS = {
    "mindspeed_rl": Pin("MindSpeed-RL", "05a90d77cb6cfad8999e2aee21068284db959579", "branch master"),
    "mindspeed_llm": Pin("MindSpeed-LLM", "a2c0733b9c8674e240a0a7607ed3f973115cc6b7", "branch 2.3.0"),
    "mindspeed": Pin("MindSpeed", "ac9f0e74061f968fdb285aa6a0df68a980fb0412", "branch 2.3.0_core_r0.12.1"),
    "megatron": Pin("Megatron-LM", "a845aa7e12b3a117e24c2352b9e3e60bad2e3a17", "tag core_v0.12.1"),
    "vllm_ascend": Pin("vllm-ascend", "1b16c01afd26f5f8f17d2e5e603622ed503d119c", "branch v0.11.0-dev"),
}


class UpstreamMismatch(RuntimeError):
    """Upstream's sources are not those that the engine was written for."""


def repository(clause: Clause) -> str:
    """The key of PINS that a clause belongs to. MindSpeed-RL's cli/ stands beside its package."""
    first = clause.file.split("/")[0]
    return "mindspeed_rl" if first == "cli" else first


def check(roots: Mapping[str, Path], contract: Iterable[Clause] = CONTRACT) -> list[Finding]:
    """Hold every clause against the sources, in the order of the contract.

    Args:
        roots: key of PINS -> checkout, or for an installed package the folder that its package folder is in. Clauses of a
            repository that is not in roots are "not checked".
        contract: the clauses.

    Raises:
        ValueError: a key that is not in PINS.
        FileNotFoundError: a root that does not hold its package.
    """
    for key, root in roots.items():
        if key not in PINS:
            raise ValueError(f"there is no repository {key!r}; known: {', '.join(PINS)}")
        if not (Path(root) / key).is_dir():
            title = PINS[key].title
            raise FileNotFoundError(f"{root} holds no folder {key}: give a checkout of {title}, or the folder that {key} is in")
    return [examine(clause, Path(roots[repository(clause)])) if repository(clause) in roots
            else Finding(clause, NOT_CHECKED, found=f"{PINS[repository(clause)].title} was not given") for clause in contract]


def require(findings: Iterable[Finding]) -> None:
    """Raise UpstreamMismatch that names each broken clause, where it broke, what is there instead and why we need it."""
    broken = [finding for finding in findings if finding.status == BROKEN]
    if broken:
        keys = dict.fromkeys(repository(finding.clause) for finding in broken)
        pins = ", ".join(f"{PINS[key].title} {PINS[key].commit[:7]} ({PINS[key].on})" for key in keys)
        details = "\n".join(f"  {each.where}\n    promised: {each.clause.promise}\n    found: {each.found}\n"
                            f"    why: {each.clause.why}" for each in broken)
        raise UpstreamMismatch(f"upstream does not fit: {len(broken)} broken promises. The engine was written for {pins}. "
                               f"The whole table: tools/check_upstream.py\n{details}")


def installed_roots() -> dict[str, Path]:
    """Where the installed packages are, for `check`, without importing any; one that is not installed is left out."""
    roots = {}
    for key in PINS:
        try:
            spec = importlib.util.find_spec(key)
        except ValueError:  # put into sys.modules by hand, without a spec
            continue
        folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or []]
        # megatron is a namespace package that may lie in several places; Megatron-LM is the one with training/.
        folders.sort(key=lambda folder: not (folder / "training").is_dir())
        if folders:
            roots[key] = folders[0].parent
    return roots


def commit_of(root: Path) -> str | None:
    """The commit of the git checkout whose top folder is `root`; None if it is none, or git is not there."""
    command = ["git", "-C", str(root), "rev-parse", "--show-toplevel", "HEAD"]
    try:
        top, commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[:2]
    except (OSError, subprocess.CalledProcessError):
        return None
    # A package in the site-packages of another project's checkout has no commit of its own.
    return commit if Path(top) == Path(root).resolve() else None
