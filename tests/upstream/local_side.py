"""The local engine's rank on what a probed run of the NPU engine dumped.

    python local_side.py CONFIG.yaml MODEL FOLDER DTYPE

CONFIG.yaml and FOLDER are a probe's (probe.py), MODEL the Hugging Face model. Written:
FOLDER/local_DTYPE.pt with the log-probs before the updates of the tokens that are trained, answer
by answer, the metrics of the iteration, by name, and the gradient of every adapter in the first
update, by the names of reference.py.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
import yaml
from reference import expert_name, unpacked

from mindspeed_qerl.families import read_shape
from mindspeed_qerl.local.batch import Answer, build_batch
from mindspeed_qerl.local.rank import TrainRank
from mindspeed_qerl.lora.adapters import lora_layers
from mindspeed_qerl.recipe.reader import read
from mindspeed_qerl.recipe.types import Layout


def main(config: Path, model: str, folder: Path, dtype: str) -> None:
    torch.set_num_threads(1)
    recipe, _ = read(yaml.safe_load(config.read_text()))
    recipe = replace(
        recipe,
        layout=Layout(world=1),
        model=replace(recipe.model, path=model, dtype=dtype),
        batch=replace(
            recipe.batch, micro_batch_size=8, mini_batch_size=recipe.batch.global_batch_size
        ),
    )
    adapters = torch.load(folder / "full.pt", weights_only=False)["adapters"]
    dock = torch.load(folder / "experience.pt", weights_only=False)["experience"]
    trainer = TrainRank(
        recipe, read_shape(recipe.model.path), 0, f"file://{folder}/rendezvous_{dtype}"
    )
    layers = dict(lora_layers(trainer.model))
    for name, layer in layers.items():
        full, expert = expert_name(name)
        a, b = adapters[full] if expert is None else (part[expert].T for part in adapters[full])
        layer.lora_A.data.copy_(a)
        layer.lora_B.data.copy_(b)
    routes = None
    if recipe.algorithm.routing_replay == "rollout":  # else the dock's column is empty
        routes = list(map(unpacked, dock["routes"]))
    columns = [dock[name] for name in ("prompts", "responses", "rollout_log_prob")]
    answers = [Answer(*(ids.tolist() for ids in row)) for row in zip(*columns)]
    for answer, recorded in zip(answers, routes or ()):
        answer.routes = recorded
    batch = build_batch(answers)
    batch.advantages[:] = [advantages[0] for advantages in dock["advantages"]]
    batch.mask[[not trained.item() for trained in dock["trained"]]] = False
    logprobs = torch.from_numpy(trainer.logprobs(batch)[batch.mask])
    gradients, step = {}, trainer.optimizer.step

    def keep_gradients():
        if not gradients:
            gradients.update(
                {
                    name: (layer.lora_A.grad.clone(), layer.lora_B.grad.clone())
                    for name, layer in layers.items()
                }
            )
        return step()

    trainer.optimizer.step = keep_gradients
    metrics = trainer.train(batch)
    whole = {}
    for name, pair in gradients.items():
        full, expert = expert_name(name)
        if expert is None:
            whole[full] = pair
        # ours are [r, in] and [out, r] for each expert, upstream's [E, in, r] and [E, r, out]
        else:
            for stacked, part in zip(
                whole.setdefault(full, tuple(map(torch.zeros_like, adapters[full]))), pair
            ):
                stacked[expert] = part.T
    found = {"logprobs": logprobs, "metrics": metrics, "gradients": whole}
    torch.save(found, folder / f"local_{dtype}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4])
