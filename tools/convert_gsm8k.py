"""Convert GSM8K to the files that training reads.

Reads a folder with train.jsonl and test.jsonl (or .parquet) of {"question", "answer"} rows, one such file whose name
begins with train or test, or a dataset of the Hugging Face Hub (openai/gsm8k). Writes to --output, for each split:

  {train,test}_chat.parquet  messages (one user turn), question, answer (canonical gold number), solution
  {train,test}.jsonl         {"problem", "answer"} for MindSpeed-RL's cli/preprocess_data.py

Every row is checked first. A bad row stops the conversion with its file and line, and nothing is written or changed.
"""

import argparse
import sys

from mindspeed_qerl.gsm8k.convert import convert


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit status: 0 converted, 1 bad input or output, 2 wrong arguments\n\n"
        "example:\n  python tools/convert_gsm8k.py --input openai/gsm8k --output data/gsm8k",
    )
    parser.add_argument("--input", required=True, metavar="DIR_OR_HUB_NAME", help="folder, file, or Hub dataset to read")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write to; made if it is not there")
    args = parser.parse_args()
    try:
        written = convert(args.input, args.output, progress=True)
    except (ValueError, OSError) as error:
        print(f"convert_gsm8k: {error}", file=sys.stderr)
        return 1
    for file in written:
        print(f"{file.path}  {file.rows:,} rows  {file.bytes:,} bytes  sha256 {file.sha256}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
