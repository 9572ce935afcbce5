"""Export the LoRA adapters of a training run for Hugging Face tools.

Reads the checkpoints of either engine (`checkpoints` in the run directory), of any tensor, pipeline
and expert parallel layout; of the MindSpeed-RL engine's, the files of all nodes must be in one
directory. Needs torch and safetensors, and neither an NPU nor Megatron. Writes to --output:

without --merged  adapter_model.safetensors and adapter_config.json, for PEFT and vLLM
(--enable-lora)
with --merged     the whole model with W + (alpha / r) B A, as the rollout engine had it, with the base
                  model's configuration and tokenizer; takes as much memory as three of its files

An adapter that does not fit the base model stops the export, and nothing is written.
"""

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mindspeed_qerl.common.entry import quietly, use_checkout

    use_checkout()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit status: 0 exported, 1 bad input or output, 2 wrong "
        "arguments\n\nexamples:\n  python tools/export_adapter.py --checkpoint "
        "RUN/checkpoints --base models/Qwen3-30B-A3B --output adapter\n  python "
        "tools/export_adapter.py --checkpoint RUN/checkpoints --iteration 200 --base "
        "models/Qwen3-30B-A3B \\\n      --output models/Qwen3-30B-A3B-gsm8k --merged",
    )
    parser.add_argument(
        "--checkpoint", required=True, metavar="DIR", help="`checkpoints` of the run directory"
    )
    parser.add_argument(
        "--iteration", type=int, metavar="N", help="which one (default: the latest)"
    )
    parser.add_argument(
        "--base",
        required=True,
        metavar="HF_DIR",
        help="the Hugging Face model that was trained, in safetensors",
    )
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="folder to make; must not hold anything"
    )
    parser.add_argument(
        "--merged", action="store_true", help="write a whole model instead of an adapter"
    )
    args = parser.parse_args()
    from mindspeed_qerl.local.checkpoint import load_adapters
    from mindspeed_qerl.lora.export import save_merged, save_peft

    try:
        adapters = load_adapters(Path(args.checkpoint), args.base, args.iteration)
        what = "PEFT adapter"
        if args.merged:
            share = save_merged(adapters, args.base, args.output)
            what = f"merged model, whose weights have {share:.2%} of the update"
        else:
            save_peft(adapters, args.base, args.output)
    except (ValueError, OSError) as error:
        print(f"export_adapter: {error}", file=sys.stderr)
        return 1
    parameters = sum(tensor.numel() for pair in adapters.weights.values() for tensor in pair)
    print(
        f"iteration {adapters.iteration}: {len(adapters.weights):,} modules, {parameters:,} "
        f"parameters, r {adapters.rank}, alpha {adapters.alpha:g}"
    )
    print(f"{args.output}: {what}")
    return 0


if __name__ == "__main__":
    sys.exit(quietly(main))
