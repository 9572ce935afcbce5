"""How a GSM8K question is put to a model.

>>> chat_messages("What is 3+4?")[0]["content"].startswith("What is 3+4? Let's think step by step")
True
"""

# The wording of verl (examples/data_preprocess/gsm8k.py): it asks for the form that the strict
# verifier wants.
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def chat_messages(question: str) -> list[dict[str, str]]:
    """One user turn, `{"role", "content"}`, for models with a chat template: the question and the
    instruction.
    """
    return [{"role": "user", "content": f"{question} {INSTRUCTION}"}]


def plain_prompt(question: str) -> str:
    """The question and a newline, for base models without a chat template: the answer is what comes
    next.
    """
    return f"{question}\n"
