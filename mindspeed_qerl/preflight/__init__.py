"""Is this machine ready for this config? A table of checks, each passed, warning, failed, accepted
or skipped, with what to type.

    checks = preflight(raw, name, Machine())     # tools/preflight.py prints them

Nothing is started or written, and nothing imported here that a run would need: no torch, no
upstream; what could hang or crash (npu-smi, CANN, a Ray that does not answer, a worker's imports)
runs as a process with a time limit.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from mindspeed_qerl.common.errors import ConfigError, unknown
from mindspeed_qerl.engines import engine_of

from . import files, host, npus, software
from .case import ACCEPTED, FAILED, WARNING, Case, Check, Question, case_of, failed, plain
from .machine import Machine
from .npus import see_npus

# Every check, by group, in the order in which they are printed.
CHECKS: dict[str, list[Question]] = {
    "NPUs": npus.CHECKS,
    "host": [*host.CHECKS, *files.ROOM, *software.CANN],
    "environment": host.VARIABLES,
    "versions": software.CHECKS,
    "config": files.CONFIG,
    "model": files.MODEL,
    "data": files.DATA,
    "checkpoints": files.CHECKPOINTS,
}
QUESTIONS = [*chain.from_iterable(CHECKS.values())]
# Checks that may fail (run.accepted_checks): not what the engine refuses by itself.
ACCEPTABLE = [plain(question.name) for question in QUESTIONS if not question.refused]


def preflight(
    raw: Mapping[str, Any], name: str, machine: Machine, own_ray: bool = False
) -> list[Check]:
    """Every check of the resolved config `name`, in the order of the table. A check that breaks is
    a failed line, never an error. What may take long is said before it does, on stderr.
    ConfigError for a run without NPUs.
    """
    case = case_of(raw, name)
    recipe = case.recipe
    if not engine_of(recipe).UPSTREAM or recipe.emulate_npu or recipe.rehearsal.enabled:
        raise ConfigError(
            f"{name} with engine = {recipe.engine}, emulate_npu = {recipe.emulate_npu} and "
            f"rehearsal.enabled = {recipe.rehearsal.enabled} uses no NPU: the preflight is for "
            "those that do, any other run checks itself when it starts"
        )
    print(
        "preflight: asking npu-smi, CANN and Ray, each for at most 20 s; then importing "
        "what a worker imports, if it is here, for at most 120 s ...",
        file=sys.stderr,
        flush=True,
    )
    case = replace(case, machine=machine, seen=see_npus(machine, own_ray))
    checks: list[Check] = []
    for group, questions in CHECKS.items():
        for question in questions:
            checks += _answers(question, group, case)
    for accepted in map(plain, case.recipe.run.accepted_checks):
        if accepted not in ACCEPTABLE:
            words = unknown("check that can be accepted", accepted, ACCEPTABLE)
            fix = f"Take {accepted} out of --accept and run.accepted_checks"
            checks.append(failed(words, fix, "run.accepted_checks", "accepted"))
    return checks


def _answers(question: Question, group: str, case: Case) -> Iterator[Check]:
    """The lines of a check."""
    if not all(getattr(case, need) for need in question.needs.split()):
        return
    try:
        answer = question.verdict(case)
        answers = [answer] if isinstance(answer, Check) else list(answer or ())
    except Exception as error:  # noqa: BLE001  a missing package, an unreadable file: go on
        answers = [failed(f"could not be checked: {type(error).__name__}: {error}")]
    for check in answers:
        state = check.state
        fix = check.fix
        name = check.name or question.name
        if state in (FAILED, WARNING):
            fix = fix or question.fix
        if state == FAILED and not question.refused and case.accepts(question.name):
            state = ACCEPTED
        yield replace(check, state=state, name=name, group=group, fix=fix)
