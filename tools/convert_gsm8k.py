"""Convert GSM8K to the files that training reads.

Reads a folder with train.jsonl and test.jsonl (or .parquet) of {"question", "answer"} rows, or a
dataset of the Hugging Face Hub (openai/gsm8k). Writes to --output, for each split:

--format chat (text; what the local engine and every evaluation read)
  {train,test}_chat.parquet  messages (one user turn), question, answer (canonical gold number),
                             solution

--format mindspeed (token ids of one model; what MindSpeed-RL's trainer reads, docs/own_task.md)
  gsm8k_{train,test}_packed_input_ids_document.{bin,idx}  the prompt in the chat template of
                                                          --tokenizer
  gsm8k_{train,test}_packed_labels_document.{bin,idx}     the canonical gold number

Every row is checked first. A bad row stops the conversion with its file and line, and nothing is
written or changed.
"""

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mindspeed_qerl.common.entry import quietly, use_checkout

    use_checkout()

from mindspeed_qerl.common.entry import json_object
from mindspeed_qerl.tasks.gsm8k.convert import convert
from mindspeed_qerl.tasks.packed import convert_packed

EPILOG = """exit status: 0 converted, 1 bad input or output, 2 wrong arguments

examples:
  python tools/convert_gsm8k.py --input openai/gsm8k --output data/gsm8k
  python tools/convert_gsm8k.py --input openai/gsm8k --output data/gsm8k --format mindspeed \\
      --tokenizer models/Qwen3-30B-A3B --max-prompt-length 512
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=EPILOG
    )
    parser.add_argument(
        "--input", required=True, metavar="DIR_OR_HUB_NAME", help="folder or Hub dataset to read"
    )
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="folder to write to; made if it is not there"
    )
    parser.add_argument(
        "--format",
        choices=("chat", "mindspeed"),
        default="chat",
        help="what to write (default: %(default)s)",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="mindspeed: directory of the Hugging Face model to be trained",
    )
    parser.add_argument(
        "--max-prompt-length",
        type=int,
        metavar="TOKENS",
        help="mindspeed: your rl_config.max_prompt_length; says how many rows the trainer will "
        "leave out because of it (all rows are written)",
    )
    parser.add_argument(
        "--chat-template-kwargs",
        type=json_object,
        metavar="JSON",
        help="mindspeed: your task.chat_template_kwargs, such as '{\"enable_thinking\": false}'",
    )
    parser.add_argument(
        "--max-steps",
        type=int,
        metavar="N",
        help="only problems whose published solution has at most N lines, 2 to 11 in GSM8K",
    )
    args = parser.parse_args()
    if (args.format == "mindspeed") != (args.tokenizer is not None):
        parser.error("--format mindspeed and --tokenizer DIR go together")
    if args.max_prompt_length is not None and (args.format == "chat" or args.max_prompt_length < 1):
        parser.error(
            "--max-prompt-length is a number of tokens, at least 1, for --format mindspeed"
        )
    if args.chat_template_kwargs and args.format == "chat":
        parser.error("--chat-template-kwargs goes with --format mindspeed")
    try:
        if args.format == "chat":
            for split, count in convert(args.input, args.output, args.max_steps).items():
                print(f"{args.output}: {count:,} rows of {split}")
        else:
            more = (args.max_steps, args.chat_template_kwargs)
            for packed in convert_packed(args.input, args.output, args.tokenizer, *more):
                print(packed.report(args.max_prompt_length))
    except (ValueError, OSError) as error:
        print(f"convert_gsm8k: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(quietly(main))
