"""The public API in a real Jupyter kernel, whose event loop is already running."""

from pathlib import Path

import nbclient
import nbformat

from tests.models import random_model

CELLS = (
    """
    import paceline
    settings = {"model": "MODEL", "data": "copy:3", "groups_per_step": 2, "group_size": 2,
                "rollout.max_response_length": 4, "placement.threads": 1, "data.limit": 256}
    run = paceline.train(steps=2, run_dir="first", **settings)
    run.summary["steps"]
    """,
    """
    later = await paceline.train_async(steps=1, run_dir="second", display=False, **settings)
    later.summary["steps"]
    """,
    """
    def half(completion, row):
        return 0.5

    steps = paceline.steps(steps=3, run_dir="third", reward=half, **settings)
    [(step.step, step.reward) for step in steps]
    """,
)


def test_notebook_trains_with_every_function(tmp_path: Path) -> None:
    model = random_model(tmp_path / "model")
    cells = [
        nbformat.v4.new_code_cell("\n".join(line[4:] for line in cell.strip("\n").split("\n")))
        for cell in CELLS
    ]
    cells[0].source = cells[0].source.replace("MODEL", model)
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(
        notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    values = [
        output["data"]["text/plain"]
        for cell in notebook.cells
        for output in cell.outputs
        if output.output_type == "execute_result"
    ]
    assert values == ["2", "1", "[(1, 0.5), (2, 0.5), (3, 0.5)]"]
    shown = str(notebook.cells[0].outputs)
    assert "step    1  reward" in shown and "Run summary" in shown
