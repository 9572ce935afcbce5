"""The loss that the NPU engine trains, in float32: upstream's log-probs and entropy over a shared
vocabulary, micro- batches and ranks, against algorithm/losses.py on the whole mini-batch in
float64, which tests/algorithm compares with verl and TRL.
"""

import pytest
import torch
from loss_ranks import OPTIONS, PROMPT, make_batch
from rehearsal import HERE, emulated, run_python

from mindspeed_qerl.algorithm.losses import LossInputs, denominator, loss
from mindspeed_qerl.algorithm.metrics import merge
from mindspeed_qerl.recipe.types import Algorithm, Correction


def expected(algorithm: Algorithm, correction: Correction):
    """(loss, its gradient by the logits, metrics) of the whole mini-batch."""
    logits, batch = make_batch()
    leaf = logits.double().requires_grad_()
    answers = leaf[:, PROMPT - 1 : -1]
    logprobs = answers.log_softmax(-1).gather(-1, batch["responses"].unsqueeze(-1)).squeeze(-1)
    entropy = -(answers.log_softmax(-1).exp() * answers.log_softmax(-1)).sum(-1)
    mask = torch.arange(batch["responses"].shape[1]) < batch["response_length"]
    mask[[2, 7]] = False  # not trained
    inputs = LossInputs(
        logprobs,
        *(batch[name].double() for name in ("old_log_prob", "rollout_log_prob")),
        batch["advantages"][:, 0].double(),
        mask,
        batch["ref_log_prob"].double(),
        entropy,
    )
    total, metrics = loss(inputs, algorithm, correction)
    (total / denominator(mask, algorithm)).backward()
    return total.item() / denominator(mask, algorithm).item(), leaf.grad, metrics


@pytest.mark.parametrize("tp, dp, micro_batch", [(1, 1, 5), (2, 1, 4), (1, 3, 1), (2, 2, 2)])
def test_on_ranks(tp, dp, micro_batch, upstream, tmp_path):
    file = tmp_path / "found"
    done = run_python([HERE / "loss_ranks.py", tp, dp, micro_batch, file], emulated(upstream))
    assert done.returncode == 0, done.stderr[-3000:]
    for (algorithm, correction), of_ranks in zip(
        OPTIONS, torch.load(file, weights_only=False), strict=True
    ):
        total, gradient, metrics = expected(Algorithm(**algorithm), Correction(**correction))
        totals, gradients, found = zip(*of_ranks)  # tensor parallel ranks count first
        assert sum(totals[::tp]) == pytest.approx(total, abs=1e-6)
        whole = torch.cat(
            [torch.cat(gradients[start : start + tp], -1) for start in range(0, tp * dp, tp)]
        )
        assert (whole - gradient).abs().max() < 1e-6 and gradient.abs().max() > 1e-2, (
            algorithm,
            correction,
        )
        assert not whole[[2, 7]].any()
        if algorithm.get("loss_mode") is None:  # clip-higher acts
            _, narrow, _ = expected(
                Algorithm(**{**algorithm, "clip_ratio_high": 0.2}), Correction(**correction)
            )
            assert (whole - narrow).abs().max() > 1e-3
        of_all = merge(found[::tp])
        assert of_all.keys() == metrics.keys()
        for name, metric in metrics.items():
            assert of_all[name].value() == pytest.approx(metric.value(), abs=1e-6, rel=1e-6), name
