"""The `evaluate` module: acceptance of block drafters, from counts per cycle."""

import datasets
import evaluate

from xpress_hf.evaluation.metric import DEFINITIONS, acceptance_figures, records_of

INPUTS = """
Args:
    predictions: for each answer, the drafted tokens kept in each cycle (`AcceptanceRecord.accepted`).
    references: for each answer, the drafted tokens verified in each cycle (`AcceptanceRecord.verified`).
    num_draft_tokens: tokens that the drafter drafts per block; a cycle that verified fewer was cut.

Returns:
"""


@evaluate.utils.file_utils.add_start_docstrings(
    "How many drafted tokens a target keeps, cycle by cycle.",
    INPUTS + "\n".join(f"    {name}: {text}." for name, text in DEFINITIONS.items()),
)
class AcceptanceMetric(evaluate.Metric):
    """Rows of all processes are pooled by cycle, so blocks of different length weigh what they are."""

    def _info(self):
        counts = datasets.Sequence(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description="How many drafted tokens a target keeps, cycle by cycle.",
            citation="",
            inputs_description=INPUTS + "\n".join(f"    {name}: {text}." for name, text in DEFINITIONS.items()),
            features=datasets.Features({"predictions": counts, "references": counts}),
        )

    def _compute(self, predictions, references, num_draft_tokens):
        figures = acceptance_figures(records_of(predictions, references, num_draft_tokens))
        return {**figures, "definitions": DEFINITIONS}
