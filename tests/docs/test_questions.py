"""Questions that a reader can answer from the documents alone, and where the answers are."""

import pytest

from tests.docs.documents import ROOT, sections_of

# Question, page#section, words of the answer.
QUESTIONS = (
    (
        "Where is staleness bounded?",
        "docs/concepts.md#admission",
        ("ticket", "(max_staleness + 1) × groups_per_step", "queue/admission.py"),
    ),
    (
        "How is the staleness of a sample measured?",
        "docs/concepts.md#staleness",
        ("trainer's version", "oldest version", "tokens"),
    ),
    (
        "How do I add a loss?",
        "docs/faq.md#how-do-i-add-a-loss",
        ("algorithm.loss=", "custom_loss.py", "every backend"),
    ),
    (
        "What happens when a rank dies?",
        "docs/faq.md#what-happens-when-a-rank-dies",
        ("replaced", "exit code 7", "--restart"),
    ),
    (
        "What do running completions do when new weights arrive?",
        "docs/concepts.md#weight-sync",
        ("drain", "interrupt", "swap", "KV cache"),
    ),
    (
        "When should I stay synchronous?",
        "docs/modes.md#when-async-loses",
        ("long prompts and short completions", "paceline simulate"),
    ),
    (
        "Does a reward function that fails give a reward of 0?",
        "docs/faq.md#does-a-failed-reward-count-as-0",
        ("No", "fails its group"),
    ),
    (
        "How do I see where the time went?",
        "docs/reading.md#3-where-did-the-time-go",
        ("wait_groups", "speed of light"),
    ),
    (
        "How do I stop a run and continue later?",
        "docs/faq.md#can-i-stop-a-run-and-continue-later",
        ("Ctrl-C", "resumes"),
    ),
    (
        "How do I know that no prompt was lost or trained twice?",
        "docs/reliability.md#audit-of-a-run",
        ("paceline audit", "trained once"),
    ),
    (
        "Will my model fit on my GPUs?",
        "docs/cluster.md#planning-a-cluster",
        ("--devices", "--shape", "does not fit"),
    ),
    (
        "How do I add engines to a running job?",
        "docs/cluster.md#running-jobs",
        ("paceline workers add", "separate pool"),
    ),
    (
        "Which tasks are built in?",
        "docs/customization.md#data",
        ("data.task", "paceline tasks"),
    ),
    (
        "How do I add a rollout engine?",
        "CONTRIBUTING.md#add-a-part",
        ("SteppedEngine", "ENGINES"),
    ),
)


@pytest.mark.parametrize(("question", "place", "words"), QUESTIONS)
def test_question_is_answered(question: str, place: str, words: tuple[str, ...]) -> None:
    path, _, anchor = place.partition("#")
    sections = sections_of(ROOT / path)
    assert anchor in sections, f"{question} {place} is gone; there are: {', '.join(sections)}"
    text = " ".join(sections[anchor].split())
    missing = [word for word in words if word not in text]
    assert not missing, f"{question} {place} does not mention {missing}"
