"""What the noise did and whether the weights arrived, from the lines that rollout workers wrote:

    python -m mindspeed_qerl.integrations.report FOLDER

Prints a table by sync, writes noise.png beside the lines (with what `pip install '.[report]'`
brings), and ends with 1 if something is wrong.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from mindspeed_qerl.common.entry import quietly
from mindspeed_qerl.common.files import Rows, read_jsonl
from mindspeed_qerl.common.markdown import markdown_table
from mindspeed_qerl.lora.arrival import syncs_to_see

FAULTS = (1, 100, 10_000, 1_000_000)  # elements
REACHED = ("aqn/target_", "aqn/reached_")
DRAWN = ("step", "aqn/expected_std", "aqn/measured_std", "aqn/changed_fraction", *REACHED)
# what `table`, `faults` and `draw` read of each
EVENTS = {
    "noise": "sync rank world step total_steps aqn/sigma aqn/layers aqn/expected_std "
    "aqn/measured_std aqn/changed_fraction",
    "measured": "sync rank step",
    "arrival": "sync rank world tensors failures of not_compared unchanged",
    "problem": "sync rank problem",
    "evaluation": "sync rank noise",
}


def read_lines(folder: Path) -> Rows:
    """Reads the lines of all workers, by sync and rank; ValueError names one that is none."""
    rows = []
    for path in sorted(folder.glob("*.jsonl")):
        for row in read_jsonl(path):
            needed = EVENTS.get(row.get("event", ""))
            if needed is None or not set(needed.split()) <= row.keys():
                raise ValueError(f"{path} has a line that no rollout worker wrote: {str(row)[:80]}")
            rows.append(row | {"worker": path.stem})
    return sorted(rows, key=lambda row: (row["sync"], row["rank"]))


def faults(rows: Rows) -> list[str]:
    """Says what is wrong with a run, a sentence each: weights that did not arrive, workers without
    noise, workers whose noise differs.
    """
    sentences = []
    by_step: dict[int, Rows] = {}
    by_sync: dict[int, Rows] = {}
    for row in rows:
        where = f"sync {row['sync']}, rank {row['rank']}"
        for failure in row.get("failures", ()):
            sentences.append(f"{where}: {failure['name']}: {failure['problem']}")
        for complaint in ("too_little", "problem"):
            if row.get(complaint):
                sentences.append(f"{where}: {row[complaint]}")
        if row["event"] == "evaluation" and row["noise"]:
            sentences.append(f"{where}: an evaluation sampled with noise")
        if row["event"] == "noise":
            by_step.setdefault(row["step"], []).append(row)
        if row["event"] == "arrival":
            by_sync.setdefault(row["sync"], []).append(row)
    for step, workers in by_step.items():
        sentences += silent(f"step {step}", "noise", workers)
        if len({row["aqn/sigma"] for row in workers}) > 1:
            sentences.append(f"step {step}: the ranks have noise of different sigma")
    for sync, workers in by_sync.items() if not by_step else ():
        sentences += silent(f"sync {sync}", "proof", workers)
    if by_step:
        last = max(by_step)
        planned = by_step[last][0]["total_steps"]
        if last + 1 < planned:
            sentences.append(
                f"the schedule has {planned} steps, and the last that sampled was {last}: the "
                "noise did not end. If the run is over, set noise.total_steps to its steps"
            )
    return sentences


def silent(when: str, what: str, rows: Rows) -> list[str]:
    """Says which ranks, or how many replicas of the engine, have no line among the `rows` of a step
    or sync, though others have.
    """
    way_out = "start vLLM with the plugin on each of them"
    lines = Counter(rank for rank, _ in {(row["rank"], row["worker"]) for row in rows})
    sentences = []
    if missing := sorted(set(range(rows[0]["world"])) - lines.keys()):
        sentences.append(f"{when}: ranks {missing} have no {what}, the others have: {way_out}")
    replicas = rows[0].get("replicas", 1)
    if min(lines.values()) < replicas:
        sentences.append(
            f"{when}: {replicas - min(lines.values())} of {replicas} replicas have no {what}: "
            f"{way_out}, with one folder for the reports of all"
        )
    return sentences


def power(rows: Rows) -> list[str]:
    """Says how soon the sampled elements show a fault, by the largest tensor."""
    total, elements = max((row.get("largest", 0), row.get("elements", 0)) for row in rows)
    if not total:
        return []
    syncs = [
        f"{syncs_to_see(fault, total, elements):,} ({fault:,})" for fault in FAULTS if fault < total
    ]
    found = ", ".join(syncs)
    return [
        f"proofs until a fault that stays is seen with 99 % (elements of it, of {total:,}): {found}"
    ]


def table(rows: Rows) -> list[str]:
    """Markdown, a line for each sync, of rank 0."""
    header = ("sync", "step", "sigma", "norms", "measured std", "changed", "reached", "arrived")
    lines: dict[int, dict[str, str]] = {}
    for row in rows:
        if row["rank"]:
            continue
        cells = lines.setdefault(row["sync"], dict.fromkeys(header, ""))
        cells["sync"] = str(row["sync"])
        if row["event"] == "noise":
            cells["step"] = str(row["step"])
            cells["sigma"] = f"{row['aqn/sigma']:.3g}"
            cells["norms"] = str(row["aqn/layers"])
            cells["measured std"] = f"{row['aqn/measured_std']:.3g}"
            cells["changed"] = f"{row['aqn/changed_fraction']:.1%}"
        elif row["event"] == "measured":
            words = [f"{row[name]:.3g}" for name in row if name.startswith(REACHED)]
            cells["reached"] = " of ".join(reversed(words))
        elif row["event"] == "arrival":
            arrived = row["tensors"] - len(row["failures"])
            cells["arrived"] = f"{arrived} of {row['tensors']} {row['of']}"
            if row["not_compared"]:
                cells["arrived"] += f", {row['not_compared']} not compared"
            if row["unchanged"]:
                cells["arrived"] += ", as before"
            if row.get("arrived") is not None:
                cells["arrived"] += (
                    f", {100 * row['arrived']:.3g} ± {100 * row['arrived_error']:.2g} % of the "
                    "update"
                )
            elif "arrived" in row:
                cells["arrived"] += ", of the update: not known"
    return markdown_table(header, (cells.values() for cells in lines.values()))


def draw(rows: Rows, folder: Path) -> list[Path]:
    """The noise by step, as a picture in `folder`; no file where there was none, or where what
    draws is not installed, which is said.
    """
    try:
        from mindspeed_qerl.runs.plots import write_plots
    except ModuleNotFoundError as lacking:
        print(f"no picture: {lacking}; pip install '.[report]' brings it", file=sys.stderr)
        return []
    steps: dict[int, dict[str, Any]] = {}
    for row in rows:
        if row["event"] in ("noise", "measured") and not row["rank"]:
            shown = {name: row[name] for name in row if name.startswith(DRAWN)}
            steps.setdefault(row["step"], {}).update(shown)
    pictures, missing = write_plots([*steps.values()], [], folder, str(folder))
    for reason in missing:
        print(f"warning: {reason}", file=sys.stderr)
    return pictures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="`report` of the settings")
    folder = parser.parse_args().folder
    if not folder.is_dir():
        parser.error(f"there is no folder {folder}")
    try:
        rows = read_lines(folder)
    except ValueError as error:
        parser.error(str(error))
    if not rows:
        parser.error(f"{folder} has no line of a rollout worker: AQN was in none")
    print("\n".join(table(rows)))
    for picture in draw(rows, folder):
        print(f"picture: {picture}")
    sentences = faults(rows)
    for line in power(rows):
        print(line)
    clean = sorted({row["sync"] for row in rows if row.get("noise") is False})
    if clean:
        print(f"evaluations without noise, after syncs {str(clean)[1:-1]}")
    reasons: Counter[str] = Counter()
    for row in rows:
        reasons.update(row.get("reasons", {}))
    for reason, count in reasons.items():
        print(f"not compared, {count:,} times: {reason}")
    if reasons and not sentences:
        print(f"nothing that was compared is wrong; not compared: {reasons.total():,}")
    else:
        print("\n".join(sentences or ["nothing is wrong"]))
    sys.exit(bool(sentences))


if __name__ == "__main__":
    quietly(main)
