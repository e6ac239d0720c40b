"""Tests of the notebooks: fresh kernels, equal pairs of files, small size, and no logic."""

import ast
import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import nbformat
import pytest

from experiments.notebooks import __main__ as command
from experiments.notebooks import execution, keep_log, pages, pictures, run_pictures, small_policy, sources
from jaxrl_llm import objectives
from jaxrl_llm.advantages.estimators import ESTIMATORS
from tests.marks import few

LARGEST_NOTEBOOK = 400_000  # In bytes, with outputs.
LARGEST_LOGS = 400_000  # In bytes.


def code_of(notebook):
  """Returns the sources of the code cells."""
  return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def outputs_of(notebook):
  """Returns the outputs of all code cells."""
  return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


# Half a minute each, mostly compilation.
@pytest.mark.slow
@pytest.mark.parametrize("name", few(sources.NAMES, 0, 1, 2, 3))
def test_a_notebook_runs_from_the_first_cell_to_the_last(name):
  notebook = execution.execute(name)
  numbers = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
  assert numbers == list(range(1, len(numbers) + 1))
  # The same cells have the same kinds of outputs as in the checked-in notebook.
  kinds = lambda made: [[sorted(output.get("data", output)) for output in cell.get("outputs", ())] for cell in made.cells]
  assert kinds(notebook) == kinds(execution.read_saved(name))
  assert not [output for output in outputs_of(notebook) if output.get("name") == "stderr"]


def test_every_notebook_is_tested():
  assert sorted(path.stem for path in sources.HERE.glob("0*.py")) == sorted(sources.NAMES)
  assert sorted(path.stem for path in sources.HERE.glob("*.ipynb")) == sorted(sources.NAMES)


@pytest.mark.parametrize("name", sources.NAMES)
def test_both_halves_of_a_pair_agree(name):
  source, saved = execution.read_source(name), execution.read_saved(name)
  assert [(cell.cell_type, cell.source) for cell in saved.cells] == [(cell.cell_type, cell.source) for cell in source.cells], (
    f"run python -m experiments.notebooks {name}"
  )
  nbformat.validate(saved)


@pytest.mark.parametrize("name", sources.NAMES)
def test_outputs_are_checked_in_and_do_not_reveal_the_machine(name):
  path = sources.HERE / f"{name}.ipynb"
  saved = execution.read_saved(name)
  assert path.stat().st_size < LARGEST_NOTEBOOK
  outputs = outputs_of(saved)
  assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
  assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2
  text = path.read_text("utf-8")
  texts = json.dumps([{key: value for key, value in output.get("data", output).items() if key != "image/png"} for output in outputs])
  patterns = {"an object": r"<[\w.]+ object at 0x", "a path": r"(?<![\w:/.])/(?:tmp|home|root|usr|Users)/"}
  for kind, pattern in patterns.items():
    assert not re.search(pattern, texts), kind
  assert "iopub" not in text
  assert all(cell.id == f"cell-{number}" for number, cell in enumerate(saved.cells))
  assert all(cell.execution_count for cell in saved.cells if cell.cell_type == "code")


@pytest.mark.parametrize("name", sources.NAMES)
def test_a_notebook_holds_no_logic(name):
  allowed = sources.OWN_FUNCTIONS.get(name, frozenset())
  problems = [
    f"cell {number}: {problem}"
    for number, code in enumerate(code_of(execution.read_source(name)), 1)
    for problem in sources.found_logic(code, allowed=allowed)
  ]
  assert not problems, problems


@pytest.mark.parametrize(
  ("code", "finding"),
  [
    ("while True:\n  pass", "line 1: While"),
    ("x = 1 if y else 2", "line 1: IfExp"),
    ("def f():\n  return 1", "line 1: FunctionDef"),
    ("class A:\n  pass", "line 1: ClassDef"),
    ("f = lambda x: x", "line 1: Lambda"),
    ("try:\n  f()\nexcept E:\n  g()", "line 1: Try"),
    ("[x for x in y if x]", "line 1: a comprehension with a condition"),
    ("\n".join(f"x{i} = {i}" for i in range(9)), "9 statements, expected at most 8 in a cell"),
  ],
)
def test_logic_is_detected(code, finding):
  assert finding in sources.found_logic(code)


def test_a_function_that_a_notebook_may_define_has_no_branches_or_loops():
  assert sources.found_logic("def f(x):\n  for i in x:\n    print(i)", allowed={"f"}) == ["line 2: For in f", "line 2: For"]


@pytest.mark.parametrize("name", sources.NAMES)
def test_a_notebook_is_a_lecture(name):
  """A title, exercises, papers, more prose than code, and a caption below every picture."""
  saved = execution.read_saved(name)
  texts = [cell.source for cell in saved.cells if cell.cell_type == "markdown"]
  prose = "\n".join(texts)
  assert texts[0].startswith(f"# {int(name[:2])}. ")
  assert "## Exercises" in prose
  assert len(set(re.findall(r"arxiv\.org/abs/\d{4}\.\d{5}", prose))) >= 3
  assert len(prose) > 4 * sum(map(len, code_of(saved)))
  for number, cell in enumerate(saved.cells):
    if any("image/png" in output.get("data", {}) for output in cell.get("outputs", ())):
      after = saved.cells[number + 1]
      assert after.cell_type == "markdown" and after.source.startswith("**Figure "), f"cell {number}: a picture without a caption"
  numbers = [int(n) for n in re.findall(r"^\*\*Figure (\d+)\.", prose, re.MULTILINE)]
  assert numbers == list(range(1, len(numbers) + 1))


def test_links_between_files_resolve():
  for name in sources.NAMES:
    prose = (sources.HERE / f"{name}.py").read_text("utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)", prose):
      if not target.startswith("http"):
        assert (sources.HERE / target).exists(), f"{name}: {target}"


def test_every_objective_is_in_the_first_lecture():
  from experiments.notebooks import objective_pictures

  drawn = [name for group in objective_pictures.FAMILIES.values() for name in group]
  assert sorted(drawn) == sorted(objectives.OBJECTIVES)
  shown = json.dumps(outputs_of(execution.read_saved("01_objectives")))
  assert not [name for name in objectives.OBJECTIVES if f"`{name}`" not in shown]


def test_every_estimator_of_advantages_is_in_the_first_lecture():
  prose = "\n".join(cell.source for cell in execution.read_saved("01_objectives").cells if cell.cell_type == "markdown")
  assert not [name for name in ESTIMATORS if f"`{name}`" not in prose]


def test_logs_are_small_and_come_from_finished_runs():
  folders = sorted(path for path in keep_log.LOGS.iterdir() if path.is_dir())
  assert sum(path.stat().st_size for folder in folders for path in folder.iterdir()) < LARGEST_LOGS
  for folder in folders:
    run = run_pictures.read(folder)
    assert run.summary["status"] == "finished"
    assert len([row for row in run.rows if row["phase"] == "rl"]) == run.summary["num_steps"]
    assert not {"command", "data", "started", "finished"} & set(run.summary)


def test_a_log_keeps_what_the_lectures_read(tmp_path):
  workdir = tmp_path / "run"
  workdir.mkdir()
  rows = [{"step": step, "phase": "warm_start", "actor/loss": 1.0} for step in range(1, 60)]
  broken = {"actor/grad_norm": None, "nonfinite": {"actor/grad_norm": "inf"}}
  rows += [{"step": 1, "phase": "rl", "actor/entropy": 1 / 3, "ratio/ess": 1.0} | broken]
  (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  (workdir / "summary.json").write_text(json.dumps({"status": "finished", "command": "secret", "num_steps": 1}))
  (workdir / "config.json").write_text("{}")
  (workdir / "samples.jsonl").write_text(json.dumps({"step": 1, "phase": "rl", "response": "#1", "token_ids": [1]}) + "\n")
  keep_log.keep(workdir, tmp_path / "log", texts=True)
  kept = run_pictures.read(tmp_path / "log")
  assert [row["step"] for row in kept.rows] == [1, 50, 1]
  assert kept.rows[-1] == {"step": 1, "phase": "rl", "actor/entropy": 0.3333} | broken
  assert kept.samples == [{"step": 1, "phase": "rl", "response": "#1"}]
  assert kept.summary == {"status": "finished", "num_steps": 1}


def test_keep_log_refuses_a_folder_without_a_run_and_a_path_as_a_name(tmp_path, capsys):
  assert keep_log.main([str(tmp_path)]) == 2
  assert capsys.readouterr().err == f"error: WORKDIR: found {tmp_path}, expected the folder of a finished run, with a summary.json\n"
  (tmp_path / "summary.json").write_text("{}")
  assert keep_log.main([str(tmp_path), "../elsewhere"]) == 2
  assert capsys.readouterr().err == "error: NAME: found '../elsewhere', expected a plain name such as gspo-0\n"


@pytest.mark.parametrize(
  ("given", "words"),
  [
    (["99"], "unknown notebook '99'"),
    (["01_objective_"], "(did you mean '01_objectives'?)"),
    (["0"], "several notebooks begin with '0'"),
    ([""], "unknown notebook ''"),
  ],
)
def test_a_wrong_name_is_refused_in_one_line(given, words, capsys):
  assert command.main(given) == 2
  message = capsys.readouterr().err
  assert words in message
  assert message.startswith("error: ") and message.count("\n") == 1 and "03_gspo_vs_grpo_vs_sapo" in message


def test_live_is_refused_for_a_notebook_that_it_would_not_change(capsys):
  assert command.main(["01", "--live"]) == 2
  assert capsys.readouterr().err == "error: --live: 01_objectives would not change; it is for 03_gspo_vs_grpo_vs_sapo\n"


def test_a_missing_extra_is_reported_in_one_line():
  block = "import sys\nsys.modules['nbclient'] = None\nfrom experiments.notebooks import __main__ as m\nsys.exit(m.main(['01']))"
  result = subprocess.run([sys.executable, "-c", block], cwd=sources.ROOT, capture_output=True, text=True)
  assert result.returncode == 2
  assert result.stderr == "error: the notebooks need nbclient: pip install -e '.[notebooks]'\n"


def test_a_cell_that_raises_is_reported_in_one_line(tmp_path, monkeypatch, capsys):
  (tmp_path / "01_objectives.py").write_text("# %%\nx = 1\n\n# %%\nx / 0\n")
  monkeypatch.setattr(execution, "HERE", tmp_path)
  assert command.main(["01"]) == 1
  assert capsys.readouterr().err == "error: 01_objectives: ZeroDivisionError: division by zero\n"
  assert not (tmp_path / "01_objectives.ipynb").exists()


def test_the_kernel_is_this_python_and_knows_whether_it_is_live(tmp_path, monkeypatch):
  cell = "import os, sys\nprint(sys.executable, os.environ['JAXRL_LLM_NOTEBOOKS'])"
  (tmp_path / "02_read_a_run.py").write_text(f"# %%\n{cell}\n")
  monkeypatch.setattr(execution, "HERE", tmp_path)
  assert outputs_of(execution.execute("02_read_a_run", live=True))[0].text == f"{sys.executable} live\n"


def test_equal_outputs_give_equal_files(tmp_path, monkeypatch):
  (tmp_path / "02_read_a_run.py").write_text("# %%\n1 + 1\n")
  monkeypatch.setattr(execution, "HERE", tmp_path)
  texts = [execution.write("02_read_a_run", execution.execute("02_read_a_run"), tmp_path).read_text() for _ in range(2)]
  assert texts[0] == texts[1]
  assert sorted(json.loads(texts[0])["metadata"]) == ["jupytext", "kernelspec", "language_info"]


def test_a_page_holds_texts_tables_and_pictures(tmp_path):
  notebook = execution.read_saved("02_read_a_run")
  page = pages.write("02_read_a_run", notebook, tmp_path / "made").read_text("utf-8")
  assert page.count("<img ") == sum("image/png" in output.get("data", {}) for output in outputs_of(notebook))
  assert page.count("<table>") >= 1
  assert "<script>alert" not in pages._markdown("| a |\n| --- |\n| `<script>alert(1)</script>` |")


def test_a_picture_has_an_image_and_a_description():
  made = pictures.picture(lambda figure: figure.subplots().plot([1, 2]), height=1.0, alt="two points")
  assert made._repr_png_().startswith(b"\x89PNG") and repr(made) == "two points"
  again = pictures.picture(lambda figure: figure.subplots().plot([1, 2]), height=1.0, alt="two points")
  assert made.png == again.png
  table = pictures.Table(["a", "bb"], [["1", "2"]])
  assert table._repr_markdown_() == "| a | bb |\n| --- | --- |\n| 1 | 2 |"
  assert repr(table) == "a  bb\n1  2"


def test_markup_in_a_response_is_escaped_in_a_table():
  assert run_pictures._quoted("1|2`3\n4") == "`1¦2'3 ⏎ 4`"
  assert len(run_pictures._quoted("x" * 500)) < 100


def test_live_runs_use_the_laptop_job(tmp_path, monkeypatch):
  asked = []
  monkeypatch.setattr(run_pictures.laptop_job, "run", lambda config, seed, folder: asked.append((config, seed, folder)) or "a row")
  trained = run_pictures.trained({"gspo": [0, 1], "sapo": [0]}, live=True)
  folder = sources.ROOT / "runs" / "laptop_job"
  pairs = [("gspo", 0), ("gspo", 1), ("sapo", 0)]
  assert asked == [(config, seed, folder) for config, seed in pairs]
  assert trained == [folder / f"{config}-{seed}" for config, seed in pairs]


def test_cells_do_not_use_private_names():
  for name in sources.NAMES:
    for code in code_of(execution.read_source(name)):
      for node in ast.walk(ast.parse(code)):
        assert not (isinstance(node, ast.Attribute) and node.attr.startswith("_")), f"{name}: {node.attr}"


def test_the_small_policy_draws_what_its_table_says():
  tokens = small_policy.draw(50 * jnp.eye(small_policy.NUM_IDS), jax.random.key(0))
  assert jnp.all(tokens == small_policy.PROMPTS[:, None]) and small_policy.is_ascending(tokens).all()
  down = small_policy.draw(50 * jnp.eye(small_policy.NUM_IDS, k=-1), jax.random.key(0))
  assert down[-1].tolist() == [5, 4, 3, 2, 1] and not small_policy.is_ascending(down)[-1]
