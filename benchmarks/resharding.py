"""What our merge and our noise cost beside upstream's own resharding, in one run of the real
upstream on the emulated NPU.

    UPSTREAM=DIR .venv-upstream/bin/python benchmarks/resharding.py [--repeats 5]

A Qwen3-MoE of 4 layers, hidden 512, 32 experts of width 256, LoRA r=32 on the four targets, two
ranks with EP=2. Each repeat syncs the training weights to vLLM three times: as upstream does it
without adapters, with the adapters merged, and with merge and noise. The clock is the slowest
rank's, around `sharding_manager.enter_infer_mode`, offload included. On CPUs: the ratio says what
our part adds, not how long either takes on an NPU.
"""

import argparse
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

# the rehearsal's models and configs
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "upstream"))
KINDS = ("upstream alone", "with merge", "with merge and noise")


def bench_classes(repeats: int):
    """The engine's worker and trainer, with a clock; made after upstream can be imported."""
    import ray

    from mindspeed_qerl.ascend import weights
    from mindspeed_qerl.ascend.trainer import QeRLTrainer
    from mindspeed_qerl.ascend.worker import QeRLWorker

    @ray.remote(resources={"NPU": 0.7})
    class BenchWorker(QeRLWorker.__ray_actor_class__):
        def time_sync(self, kind: str) -> float:
            merged = weights.MergedWeights.__getitem__
            if kind == "upstream alone":
                weights.MergedWeights.__getitem__ = dict.__getitem__
            self.inference_model.noise_step = 1 if kind.endswith("noise") else None
            started = time.perf_counter()
            self.sharding_manager.enter_infer_mode()
            seconds = time.perf_counter() - started
            weights.MergedWeights.__getitem__ = merged
            self.sharding_manager.exit_infer_mode()
            self.actor_offloader.onload_param()
            return seconds

    class BenchTrainer(QeRLTrainer):
        def fit(self, data_iters):
            times = {kind: [] for kind in KINDS}
            for repeat in range(repeats + 1):  # the first warms up
                for kind in KINDS:
                    seconds = max(self.actor_worker.execute_sync_command("time_sync", kind))
                    if repeat:
                        times[kind].append(seconds)
            base = median(times[KINDS[0]])
            for kind in KINDS:
                print(
                    f"{kind:22s} {median(times[kind]):7.3f} s a sync, x "
                    f"{median(times[kind]) / base:.2f}   (each: "
                    + " ".join(f"{t:.3f}" for t in times[kind])
                    + ")",
                    flush=True,
                )
            ray.shutdown()

    return BenchWorker, BenchTrainer


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, help="syncs of each kind that count")
    arguments = parser.parse_args()
    if "UPSTREAM" not in os.environ:
        parser.error(
            "UPSTREAM must name the folder with the checkouts of MindSpeed-RL, MindSpeed-LLM, "
            "MindSpeed and Megatron-LM"
        )
    import rehearsal

    if "RESHARDING" not in os.environ:  # once more, with the checkouts on the path from the start
        os.environ |= rehearsal.environment(Path(os.environ["UPSTREAM"]).resolve()) | {
            "RESHARDING": "1"
        }
        os.execv(sys.executable, [sys.executable, *sys.argv])

    from mindspeed_qerl import train
    from mindspeed_qerl.ascend import engine

    config_class, shape, megatron = rehearsal.FAMILIES["qwen3_moe"]
    rehearsal.FAMILIES["qwen3_moe"] = (
        config_class,
        {
            **shape,
            "num_hidden_layers": 4,
            "hidden_size": 512,
            "num_experts": 32,
            "moe_intermediate_size": 256,
        },
        {
            **megatron,
            "num_layers": 4,
            "hidden_size": 512,
            "num_experts": 32,
            "moe_ffn_hidden_size": 256,
        },
    )
    load_upstream = engine.load_upstream

    def load_with_clock(settings, observer):
        module = load_upstream(settings, observer)
        from mindspeed_rl.workers.scheduler import launcher

        worker, trainer = bench_classes(arguments.repeats)
        launcher.resource_mapping[worker.__ray_actor_class__.__name__] = lambda config: (
            config.actor_resource
        )
        module.IntegratedWorker, module.RayGRPOTrainer = worker, partial(trainer, observer=observer)
        return module

    engine.load_upstream = load_with_clock
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        model, data = (
            rehearsal.make_model("qwen3_moe", folder / "model"),
            rehearsal.make_data(folder / "model", folder / "data"),
        )
        config = rehearsal.make_config(
            "qwen3_moe",
            model,
            data,
            folder,
            ep=2,
            infer_ep=2,
            changes={
                "megatron_training.lora_r": 32,
                "megatron_training.lora_alpha": 64,
                "aqn.num_stages": 2,
            },
        )
        return train.run(config, "resharding")


if __name__ == "__main__":
    sys.exit(main())
