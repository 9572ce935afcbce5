"""The run's observer, told of answers as token ids."""

from mindspeed_qerl.families import end_tokens
from mindspeed_qerl.recipe.types import Recipe
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import MetricsWriter
from mindspeed_qerl.runs.observer import RunObserver
from mindspeed_qerl.runs.progress import Progress
from mindspeed_qerl.tasks.evaluation import evaluate_answers
from mindspeed_qerl.tasks.packed import read_packed_rows, rows_of_labels
from mindspeed_qerl.tasks.prompts import Prompts, load_tokenizer


class TokenObserver(RunObserver):
    """RunObserver with the tokenizer and the rows of the task.

    Attributes:
        problems: rows and prompts of the evaluation. ends: ids of the tokens that end an answer.

    Raises:
        ConfigError: tokenizer or rows are wrong, or another evaluation than when the run started.
    """

    def __init__(
        self, recipe: Recipe, run: RunDirectory, metrics: MetricsWriter, progress: Progress
    ):
        super().__init__(recipe, run, metrics, progress)
        self.tokenizer = load_tokenizer(recipe.model.path)
        self.ends = end_tokens(recipe.model.path, self.tokenizer)
        self.problems = Prompts(
            recipe.task.test_file,
            self.tokenizer,
            recipe.task.prompt,
            recipe.sampling.max_prompt_length,
            recipe.evaluation.n_problems,
            run.started,
            recipe.task.chat_template_kwargs,
        )
        run.keep(evaluation_prompts=self.problems.digest())
        if self.problems.dropped:
            progress.message(self.problems.left_out("evaluation"))
        self.packed_rows = read_packed_rows(recipe.task.data_path)

    def sampled_tokens(self, step: int, answers: dict[str, list]) -> None:
        """`sampled`, with columns of the transfer dock, a tensor for each answer."""
        texts = []
        for column in ("prompts", "responses", "labels"):
            ids = answers[column][: self.recipe.run.rollout_samples]
            texts.append(self.tokenizer.batch_decode(ids, skip_special_tokens=True))
        questions, responses, labels = texts
        golds = [row.answer for row in rows_of_labels(labels, self.packed_rows)]
        columns = zip(questions, responses, golds, map(float, answers["rm_scores"]))
        names = ("question", "response", "answer", "reward")
        self.sampled(step, (dict(zip(names, values)) for values in columns))

    def evaluated_tokens(self, step: int, answers: list[list[list[int]]], seconds: float) -> None:
        """`evaluated`, with the token ids of each problem's answers."""
        responses = [ids for group in answers for ids in group]
        limit = self.recipe.sampling.max_tokens
        truncated = [len(ids) >= limit and ids[-1] not in self.ends for ids in responses]
        result, scored = evaluate_answers(
            self.problems.rows,
            self.tokenizer.batch_decode(responses, skip_special_tokens=True),
            truncated,
            self.recipe.evaluation.samples_per_problem,
            self.recipe.task.verifier_function[0],
        )
        self.evaluated(step, result, scored, seconds)
