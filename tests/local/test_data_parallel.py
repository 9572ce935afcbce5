"""Every option of the loss with one and four data-parallel ranks and micro-batches of several
sizes: the same losses, metrics and gradients of every adapter. What they should be is in
tests/algorithm; here the ranks' code joins them.
"""

import faulthandler
from dataclasses import replace

import numpy as np
import pytest
import torch

from mindspeed_qerl.local.batch import deal
from mindspeed_qerl.recipe.types import Correction

from .conftest import batch_of, make_model, recipe_of, run_ranks

MINI, MINIS = 12, 2  # answers of an update, and updates
ONE = (1, MINI)
LAYOUTS = [(1, 5), (4, 1), (4, 2)]  # ranks, answers of a micro-batch


def option(cut="", correction=None, **algorithm):
    """(of Algorithm, of Correction, answers that are cut off and masked)"""
    return algorithm, correction or {}, cut


ICEPOP = {"method": "icepop", "cap": 1.3, "floor": 0.8}
OPTIONS = {
    "vanilla": option(),
    "gspo": option(loss_mode="gspo", clip_ratio_low=0.01, clip_ratio_high=0.02),
    "sapo": option(loss_mode="sapo", loss_agg_mode="seq-mean-token-mean"),
    "one's own": option(loss_mode="tests.local.own_loss:truncated"),
    "seq-mean-token-mean": option(loss_agg_mode="seq-mean-token-mean"),
    "seq-mean-token-sum-norm": option(
        loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=20.0
    ),
    "sequence_tis": option(correction={"method": "sequence_tis", "cap": 1.3}),
    "sequence_mask": option(correction=ICEPOP | {"method": "sequence_mask"}),
    "geometric_mask": option(correction={"method": "geometric_mask", "cap": 1.1, "floor": 0.9}),
    "KL k3": option(kl_coefficient=0.3),
    "KL in the reward": option(kl_coefficient=0.3, use_kl_in_reward=True),
    "entropy bonus": option(entropy_coefficient=0.2),
    "cut off": option("a quarter"),
    "cut off, all together": option(
        "a quarter",
        ICEPOP,
        loss_agg_mode="seq-mean-token-mean",
        kl_coefficient=0.3,
        entropy_coefficient=0.2,
    ),
    "cut off, all of an update": option("an update", loss_agg_mode="seq-mean-token-sum"),
}


def batch_of_two_updates(logprobs=None):
    """Answers of 1 to 12 tokens to prompts of 3 to 8. logprobs: of the policy that is trained; the
    one before the update and the one that sampled are far enough from it for every bound to act.
    """
    rng = np.random.default_rng(0)
    count = MINI * MINIS
    prompts = [rng.integers(0, 96, rng.integers(3, 9)).tolist() for _ in range(count)]
    answers = [rng.integers(0, 96, rng.integers(1, 13)).tolist() for _ in range(count)]
    batch = batch_of(prompts, answers, advantages=2 * rng.normal(size=count))
    if logprobs is None:
        return batch
    old = (logprobs + 0.2 * rng.normal(size=logprobs.shape)).astype(np.float32)
    rollout = (old + 0.2 * rng.normal(size=logprobs.shape)).astype(np.float32)
    return replace(batch, old_logprobs=old, rollout_logprobs=rollout * batch.mask)


def cut_off(batch, which):
    """`a quarter` of the first update by length: all answers of rank 1 of 4."""
    mask = batch.mask.copy()
    if which == "an update":
        mask[MINI:] = False
    elif which:
        mask[deal(batch.lengths[:MINI], MINI, 4, 1)[0]] = False
    return replace(batch, mask=mask)


def options_rank(start, config, layouts, folder):
    """One start: every option with each size of micro-batch; the metrics, and the gradients of each
    update.
    """
    faulthandler.dump_traceback_later(300, exit=True)  # ranks that wait for each other for ever
    trainer = start(config)
    gradients = []
    for number, (_, layer) in enumerate(
        trainer.adapters.layers
    ):  # B away from 0, so that A has a gradient
        layer.lora_B.data.normal_(std=0.02, generator=torch.Generator().manual_seed(number))
    if layouts[0] == ONE:
        np.save(f"{folder}/logprobs.npy", trainer.logprobs(batch_of_two_updates()))
    batch = batch_of_two_updates(np.load(f"{folder}/logprobs.npy"))
    reduce_and_clip = trainer._reduce_and_clip

    def watched():
        norm = reduce_and_clip()
        gradients.append(
            torch.cat([parameter.grad.reshape(-1) for parameter in trainer.parameters])
        )
        return norm

    trainer._reduce_and_clip = watched
    trainer.optimizer.step = lambda: None  # both updates of the same weights
    results = {}
    for layout in layouts:
        for name, (algorithm, correction, truncated) in OPTIONS.items():
            trainer.recipe = trainer.passes.recipe = replace(
                config,
                algorithm=replace(config.algorithm, **algorithm),
                correction=Correction(**correction),
                batch=replace(config.batch, micro_batch_size=layout[1]),
            )
            metrics = trainer.train(cut_off(batch, truncated))
            results[layout, name] = (
                {key: value for key, value in metrics.items() if "time/" not in key},
                gradients.copy(),
            )
            gradients.clear()
    return results


@pytest.fixture(scope="module")
def results(data_dir, tmp_path_factory):
    """{(layout, option): [(metrics, gradients of each update) of each rank]}."""
    folder = tmp_path_factory.mktemp("data_parallel")
    model_dir, found = make_model("qwen3", folder / "model", num_hidden_layers=1), {}
    for ranks in (1, 4):
        config = recipe_of(
            model_dir,
            data_dir,
            rl_config__actor_resource__num_npus=ranks,
            megatron_training__global_batch_size=12,
            rl_config__mini_batch_size=MINI // 2,
            rl_config__n_samples_per_prompt=2,
            actor_config__expert_model_parallel_size=1,
            actor_config__clip_grad=0.0,
            rl_config__clip_ratio_low=0.15,
            rl_config__clip_ratio_high=0.2,
        )
        layouts = [layout for layout in (ONE, *LAYOUTS) if layout[0] == ranks]
        for of_rank in run_ranks(options_rank, ranks, config, layouts, folder):
            for key, result in of_rank.items():
                found.setdefault(key, []).append(result)
    return found


@pytest.mark.parametrize(
    "layout", LAYOUTS, ids=lambda layout: "{} ranks, micro-batches of {}".format(*layout)
)
@pytest.mark.parametrize("option", OPTIONS)
def test_ranks_and_micro_batches_change_nothing(results, option, layout):
    ((expected, gradients),) = results[ONE, option]
    assert len(gradients) == (1 if option.endswith("an update") else MINIS) == expected["updates"]
    for metrics, of_rank in results[layout, option]:
        assert metrics.keys() == expected.keys()
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-6), name
        for gradient, wanted in zip(of_rank, gradients, strict=True):
            assert (gradient - wanted).norm() <= 1e-6 * wanted.norm()
            assert (gradient - wanted).abs().max() <= 1e-6 * max(1, wanted.abs().max())
