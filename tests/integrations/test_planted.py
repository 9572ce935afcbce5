"""Planted faults through vLLM in each stack, and what the report has to say of them."""

import json
import re

import pytest

from mindspeed_qerl.integrations import report
from tests import ROOT
from tests.integrations.planted import HEALTHY, OLD, faults_by_sync
from tests.integrations.programs import packages, run_program, with_tokenizer

SETTINGS = '{"report": "report", "stop": false, "noise": null}'
NOISE = '{"report": "report", "stop": false, "replicas": 2, "noise": {"total_steps": 59}}'

# what else went wrong in the program
LACKING = {
    "trl": ["step 10 sampled with the weights of step 9: no sync came"],
    "verl_adapters": ["requests sample with no adapter instead of [123], loaded in sync 60"],
    "path_adapters": [
        "requests sample with no adapter instead of [59], loaded in sync 59",
        (
            "requests sample with no adapter instead of [59], loaded in sync 59; sync 60, of "
            "weights, has removed it from vLLM"
        ),
    ],
}
ALL = """
transfer-qwen3 transfer-qwen3_moe trl-qwen3 trl-qwen3_moe verl-qwen3 verl-qwen3_moe
transfer_tp-qwen3 transfer_tp-qwen3_moe transfer_tp-phi3 transfer_pp-qwen3 transfer_dp-qwen3
int8-qwen3 sparse-qwen3 m2n-qwen3 verl_adapters-qwen3 path_adapters-qwen3
""".split()
# of a sync on each rank: tensors that are compared, and that are not
COUNTS = json.loads("""{
    "transfer_pp-qwen3": [[12, 0], [13, 0]],
    "transfer_tp-phi3": [[15, 0], [15, 0]],
    "int8-qwen3": [[11, 28]]
}""")


def check_report(folder, case):
    """Each fault of the program is named as what it is, and nothing else."""
    stack, family = case.split("-")
    rows = report.read_lines(folder)
    planted = faults_by_sync(stack, family)
    assert len({row["sync"] for row in rows}) >= HEALTHY + len(planted)
    found = {}
    for row in rows:
        for name, problem in (each.values() for each in row.get("failures", ())):
            found.setdefault(row["sync"], {})[name] = problem
            assert row["rank"] == row["world"] - 1
    problems = [row["problem"] for row in rows if row["event"] == "problem"]
    told = report.faults(rows)
    if stack == "transfer_dp":  # both replicas have them
        told = [*set(told)]
    silent = [each for each in told if "1 of 2 replicas have no noise: start vLLM" in each]
    assert len(silent) == (len(planted) if stack == "transfer_dp" else 0)
    assert len(told) == sum(map(len, found.values())) + len(problems) + len(silent)
    if counts := COUNTS.get(case):
        seen = [[row["tensors"], row["not_compared"]] for row in rows if row["event"] == "arrival"]
        assert seen[: len(counts)] == counts and len(seen) == len(counts) * max(planted)
    for sync, fault in planted.items():
        expected = fault.named()
        named = found.pop(sync)
        assert named.keys() == expected.keys()
        for name, words in expected.items():
            assert re.search(words, named[name]), (sync, name)
    if stack == "path_adapters":  # vLLM does not read a file again under the name of an older one
        assert set(found.pop(62).values()) == {OLD}
    assert found == {}
    lacking = LACKING.get(stack, [])
    assert len(problems) == len(lacking)
    assert all(map(str.startswith, problems, lacking))


def run(folder, case):
    stack, family = case.split("-")
    settings = NOISE if stack == "transfer_dp" else SETTINGS
    variables = {} if stack == "trl" else {"MINDSPEED_QERL_ROLLOUT": settings}
    run_program(
        ROOT / "tests/integrations/planted_run.py",
        folder,
        stack,
        family,
        with_tokenizer(family, folder / "model"),
        PYTHONPATH=f"{ROOT}:{packages(folder / 'packages')}",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND="0|1" if "transfer_" in stack else "auto",
        VERL_RAY_JOB_ID="test",
        **variables,
    )


@pytest.mark.full
@pytest.mark.parametrize("case", ALL)
def test_each_fault_is_named_and_no_healthy_sync_is(tmp_path, case):
    run(tmp_path, case)
    check_report(tmp_path / "report", case)


@pytest.mark.full
def test_a_mixture_with_adapters_is_refused_by_vllm(tmp_path):
    with pytest.raises(AssertionError, match="'triton.language' has no attribute 'float32'"):
        run(tmp_path, "path_adapters-qwen3_moe")


def test_each_cell_of_the_matrix_has_its_test():
    page = (ROOT / "docs" / "integrations.md").read_text()
    cells = re.findall(
        r"\| (.*?) (?=\|)", page.partition("## What was shown")[2].partition("##")[0]
    )
    sources = "".join(path.read_text() for path in ROOT.glob("tests/*/test_*.py"))
    tests = {*ALL, *re.findall(r"def (test_\w+)", sources)}
    told = [cell for cell in cells if re.match("(proved|not compared|refused|healthy) `", cell)]
    assert len(told) >= 10
    assert set(re.findall("`(.*?)`", "".join(told))) <= tests
