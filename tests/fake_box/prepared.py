"""Model, data and converted base weights of a config, as its preflight wants them: the right files,
shapes and sizes, and holes in place of weights, which take no room on the disk.
"""

import json
import zipfile
from pathlib import Path

from mindspeed_qerl.common.files import TRACKER
from mindspeed_qerl.layout.plan import plan_of
from mindspeed_qerl.layout.sizes import model_parameters
from mindspeed_qerl.preflight.files import rank_files
from mindspeed_qerl.recipe.compose import compose
from mindspeed_qerl.recipe.reader import read_recipe
from mindspeed_qerl.tasks.gsm8k.convert import convert
from mindspeed_qerl.tasks.packed import indexed_format
from tests.families.public_models import MODELS

ROWS = {"train": 7473, "test": 1319}  # of GSM8K


def prepare(name, folder, rows=ROWS):
    """Write what config `name` reads below `folder`; the variables that say so."""
    models, data = folder / "models", folder / "data"
    raw = compose(name)
    recipe = read_recipe(raw)
    model = models / Path(recipe.model.path).name
    plan = plan_of(recipe)
    write_model(model, 2 * model_parameters(plan.shape))
    write_base(models / Path(recipe.model.load).name, rank_files(plan))
    packed = data / "gsm8k" / model.name / Path(recipe.task.data_path).name
    write_data(data / "gsm8k", packed, rows)
    return {"MODELS": str(models), "DATA": str(data)}


def write_model(folder, size):
    folder.mkdir(parents=True)
    weights = "model-00001-of-00001.safetensors"
    for file, content in (
        ("config.json", MODELS[folder.name]),
        ("tokenizer.json", {}),
        ("tokenizer_config.json", {"chat_template": "..."}),
        ("model.safetensors.index.json", {"weight_map": {"lm_head.weight": weights}}),
    ):
        (folder / file).write_text(json.dumps(content))
    header = json.dumps(
        {"lm_head.weight": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    ).encode()
    hole(folder / weights, 8 + len(header) + size)
    with open(folder / weights, "r+b") as file:
        file.write(len(header).to_bytes(8, "little") + header)


def write_base(folder, sizes, tracker="1"):
    """Megatron's files of every rank: zips, as torch.save writes, of the given sizes."""
    iteration = "release" if tracker == "release" else f"iter_{int(tracker):07d}"
    for name, size in sizes.items():
        file = folder / iteration / name / "model_optim_rng.pt"
        file.parent.mkdir(parents=True)
        hole(file, size)
        with zipfile.ZipFile(file, "a") as archive:
            archive.writestr("data.pkl", name)
    (folder / TRACKER).write_text(tracker)


def write_data(folder, packed, counts):
    """GSM8K's numbers of rows, no question twice."""
    source = folder.parent / "source"
    source.mkdir(parents=True)
    first = 0
    for split, rows in counts.items():
        (source / f"{split}.jsonl").write_text(
            "".join(
                json.dumps(
                    {"question": f"What is {n} + {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"}
                )
                + "\n"
                for n in range(first, first + rows)
            )
        )
        first += rows
    convert(source, folder)
    packed.parent.mkdir(parents=True)
    for column, rows in (
        ("input_ids", [[5, 6, 7, 8 + n % 90000] for n in range(counts["train"])]),
        ("labels", [[8 + n % 90000] for n in range(counts["train"])]),
    ):
        for ending, content in zip(("bin", "idx"), indexed_format(rows)):
            Path(f"{packed}_packed_{column}_document.{ending}").write_bytes(content)


def hole(file, size):
    with open(file, "wb") as empty:
        empty.truncate(size)
