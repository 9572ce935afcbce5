"""Pack the rows of your own task for MindSpeed-RL's trainer: token ids of one model
(docs/own_task.md).

    python tools/pack_task.py --rows my_task/train.jsonl --tokenizer models/Qwen3-30B-A3B-Instruct-2507 \\
        --data-path data/my/train

writes {data-path}_packed_{input_ids,labels}_document.{bin,idx} and {data-path}_rows.jsonl, where
the reward finds each row. Every row is checked first: whatever fails, nothing is written or
changed. GSM8K itself is written by tools/convert_gsm8k.py --format mindspeed.
"""

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mindspeed_qerl.common.entry import quietly, use_checkout

    use_checkout()

from mindspeed_qerl.common.entry import json_object
from mindspeed_qerl.tasks.packed import pack_rows
from mindspeed_qerl.tasks.rows import read_rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit status: 0 packed, 1 bad input or output, 2 wrong arguments",
    )
    parser.add_argument(
        "--rows",
        required=True,
        metavar="FILE",
        help=".jsonl or .parquet with prompt or messages, and answer (docs/own_task.md)",
    )
    parser.add_argument(
        "--tokenizer", required=True, metavar="DIR", help="of the Hugging Face model to be trained"
    )
    parser.add_argument(
        "--data-path",
        required=True,
        metavar="PREFIX",
        help="megatron_training.data_path: folder and name",
    )
    parser.add_argument(
        "--max-prompt-length",
        type=int,
        metavar="TOKENS",
        help="your rl_config.max_prompt_length; says how many rows the trainer will leave out",
    )
    parser.add_argument(
        "--chat-template-kwargs",
        type=json_object,
        metavar="JSON",
        help="your task.chat_template_kwargs, such as '{\"enable_thinking\": false}'",
    )
    args = parser.parse_args()
    try:
        rows, variables = read_rows(args.rows), args.chat_template_kwargs
        packed = pack_rows(rows, args.data_path, args.tokenizer, variables)
    except (ValueError, OSError, TypeError) as error:
        print(f"pack_task: {error}", file=sys.stderr)
        return 1
    print(packed.report(args.max_prompt_length))
    return 0


if __name__ == "__main__":
    sys.exit(quietly(main))
