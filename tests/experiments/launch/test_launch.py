"""Command line of sweeps: refusals, dry runs, the folder's record, the table and the CSV."""

import csv
import fcntl
import io
import json
import shlex
import subprocess
import sys

import pytest
import rich.console

from experiments.launch import __main__ as launcher
from experiments.launch import rows, status, table, trial
from experiments.launch.rows import make_row
from experiments.launch.status import Status
from jaxrl_llm.config import command_line

MODULE = "jaxrl_llm.main"
BASE = ("--config=configs/gspo.py:tiny", "--sweep=experiments/sweeps/clip_range.py")


@pytest.mark.parametrize(
  "args, message",
  [
    ((), "error: --config is missing"),
    ((*BASE, "--target=slrm"), "error: --target: found 'slrm', expected one of local, slurm, xpk, skypilot"),
    ((*BASE, "--max_paralel=2"), "error: --max_paralel: unknown, did you mean --max_parallel?"),
    ((*BASE, "--max_parallel=0"), "error: --max_parallel: found '0', expected a whole number of at least 1"),
    ((*BASE, "--max_restart=2"), "error: --max_restart: unknown for --target=local, did you mean --max_restarts?"),
    ((*BASE, "--max_restarts=two"), "error: --max_restarts: found 'two', expected a whole number"),
    ((*BASE, "--dry_run=maybe"), "error: --dry_run: found 'maybe', expected no value"),
    ((*BASE, "--seeds=0,a"), "error: --seeds: found '0,a', expected whole numbers separated by commas"),
    ((*BASE, "--seeds=1,1"), "error: --seeds: found '1,1', expected each seed only once"),
    ((*BASE, "--seeds=1,2"), "error: --seeds: the rows of experiments/sweeps/clip_range.py have seeds of their own"),
    ((*BASE, "stray"), "error: unknown argument 'stray', expected flags only"),
    ((*BASE, "--num_trials=3"), "error: --num_trials: found it without --search"),
    ((*BASE, "--search=grid", "--num_trials=3"), "error: --search: found 'grid', expected random or tpe"),
    ((*BASE, "--search=tpe"), "error: --num_trials: not set; --search requires it"),
    ((*BASE, "--search=tpe", "--num_trials=3"), "found no space(h), expected one with --search"),
    ((*BASE, "--search=tpe", "--num_trials=3", "--target=slurm"), "error: --search: found --target=slurm"),
    ((*BASE, "--workdirs=/mnt/runs"), "error: --workdirs: found it with --target=local"),
    ((*BASE, "--config.num_stps=3"), "error: unknown field config.num_stps; did you mean config.num_steps?"),
    (("--config=configs/gspo.py",), "error: --sweep=configs/gspo.py: found neither of sweep(add) and get_hyper(h)"),
    (("--config=configs/gspoo.py", BASE[1]), "configs/vespo.py; did you mean configs/gspo.py?"),
    ((BASE[0], "--sweep=experiments/sweeps/seds.py"), "seeds.py; did you mean experiments/sweeps/seeds.py?"),
  ],
)
def test_wrong_input_is_one_line(args, message, capsys, tmp_path, monkeypatch):
  assert launcher.main([*args, f"--folder={tmp_path / 'sweep'}"]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert message in line
  assert not (tmp_path / "sweep").exists()


def test_a_dry_run_starts_nothing(capsys, tmp_path):
  assert launcher.main([*BASE, f"--folder={tmp_path / 'a b'}", "--max_parallel=2", "--dry_run"]) == 0
  *_, last = capsys.readouterr().out.splitlines()
  assert last == f"8 trial(s), 2 at a time, in {tmp_path / 'a b'}; nothing was started" and not (tmp_path / "a b").exists()


def test_a_printed_command_is_accepted_by_the_run(capsys, tmp_path):
  text = "def sweep(add):\n  add({'task.levels': (1, 2), 'rollout.stop_strings': ('\\n', 'a b')})\n"
  (tmp_path / "mine.py").write_text(text)
  args = [BASE[0], f"--sweep={tmp_path / 'mine.py'}", f"--folder={tmp_path / 'f'}", "--dry_run"]
  assert launcher.main([*args, "--seeds=3"]) == 0
  _, command = capsys.readouterr().out.split(f"-m {MODULE} ")
  parsed = command_line.parse([MODULE, *shlex.split(command.rpartition("\n1 trial")[0])])
  assert (parsed.config.seed, tuple(parsed.config.task.levels), str(parsed.workdir.parent)) == (3, (1, 2), str(tmp_path / "f"))
  assert tuple(parsed.config.rollout.stop_strings) == ("\n", "a b")


def test_another_launcher_in_the_folder_is_refused(tmp_path, capsys):
  folder = tmp_path / "sweep"
  folder.mkdir()
  with open(folder / ".launcher", "w") as file:
    file.write("process 1234")
    file.flush()
    fcntl.flock(file, fcntl.LOCK_EX)
    assert launcher.main([*BASE, f"--folder={folder}"]) == 2
  assert f"--folder={folder}: another launcher is using it (process 1234)" in capsys.readouterr().err


def test_a_config_may_carry_its_own_sweep(tmp_path, capsys):
  text = "from configs import gspo\nget_config = gspo.get_config\n\ndef sweep(add):\n  add(num_steps=3)\n  add(num_steps=5)\n"
  (tmp_path / "mine.py").write_text(text)
  assert launcher.main([f"--config={tmp_path / 'mine.py'}:tiny", "--seeds=0,1", "--dry_run"]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert [line.split(maxsplit=1)[1] for line in lines[:-1:2]] == [f"num_steps={n} seed={seed}" for n in (3, 5) for seed in (0, 1)]
  assert lines[-1].startswith("4 trial(s), 1 at a time, in runs/sweeps/mine-tiny; ")


def test_runs_of_an_older_config_are_not_taken_as_trials(tmp_path, capsys):
  (row, *_) = rows.read_sweep("experiments/sweeps/seeds.py")
  args = [BASE[0], "--sweep=experiments/sweeps/seeds.py", f"--folder={tmp_path}", "--dry_run"]
  config = command_line.override(command_line.load("configs/gspo.py:tiny"), {"seed": ["0"]}).to_dict()
  (tmp_path / row.id).mkdir()
  (tmp_path / row.id / "config.json").write_text(json.dumps(config))
  assert launcher.main(args) == 0
  (tmp_path / row.id / "config.json").write_text(json.dumps(config | {"num_steps": 7}))
  assert launcher.main(args) == 2
  assert capsys.readouterr().err == (
    f"error: {tmp_path / row.id} holds a run with another config (num_steps: 7 there, 4 now); "
    "restore these values, or choose another --folder\n"
  )


def test_an_impossible_folder_is_one_line(tmp_path, capsys):
  (tmp_path / "file").touch()
  assert launcher.main([*BASE, f"--folder={tmp_path / 'file' / 'sweep'}"]) == 2
  assert f"error: --folder={tmp_path / 'file' / 'sweep'}: Not a directory; expected" in capsys.readouterr().err


def make_sweep(folder, **more):
  return trial.Sweep(**(dict(name="mine", config=BASE[0], base={}, folder=folder, workdirs=str(folder)) | more))


def test_a_folder_remembers_its_sweep(tmp_path):
  sweep, made = make_sweep(tmp_path), [make_row({"seed": seed}) for seed in range(3)]
  assert trial.record(sweep, made[:2]) == {}
  assert trial.record(sweep, made[1:]) == {made[0].id: {"seed": 0}}
  with pytest.raises(trial.SweepError, match=r"it holds a different sweep \(base: \{\} there, .*num_steps"):
    trial.record(make_sweep(tmp_path, base={"num_steps": ["3"]}), made)
  (tmp_path / "sweep.json").write_text("{")
  with pytest.raises(trial.SweepError, match="sweep.json: not JSON"):
    trial.record(sweep, made)


def test_names_and_workdirs_come_from_files_and_ids(tmp_path):
  one = trial.make_trial(make_sweep(tmp_path, workdirs="gs://bucket/s/", base={"num_steps": ["3"], "seed": ["9"]}), make_row({"seed": 1}))
  assert one.workdir == f"gs://bucket/s/{one.row.id}" and one.name == f"mine-{one.row.id}"
  assert one.command[3:] == (f"--config={BASE[0]}", "--config.num_steps=3", "--config.seed=1", f"--workdir={one.workdir}")


TRIALS = [
  trial.Trial("a", make_row({"objective.clip_low": 1e-3, "task.levels": (1, 2), "seed": 0}), "w/a", ()),
  trial.Trial("b", make_row({"objective.clip_low": 1e-3, "task.levels": (1, 3), "seed": 0}), "w/b", ()),
  trial.Trial("c", make_row({"objective.clip_low": 1e-3, "objective.name": "sapo", "seed": 0}), "w/c", ()),
]
STATUSES = [
  Status("finished", 2, 4, 4, 0.1234567891, 0.5, 75.0),
  Status("failed", 1, 2, 4, 0.25, 0.375, 7325.0, 'exit status 1: "no", said\tit, [bold]'),
  Status("waiting"),
]


def test_the_csv_is_exact(tmp_path):
  status.write_csv(TRIALS, STATUSES, tmp_path / "summary.csv")
  with open(tmp_path / "summary.csv", newline="") as file:
    one, two, three = csv.DictReader(file)
  assert list(one) == [
    "id", "task.levels", "objective.name", "state", "attempts", "steps", "accuracy_start", "accuracy_final", "seconds", "workdir", "error",
  ]  # fmt: skip
  assert status.value_in(one["task.levels"]) == [1, 2] and one["objective.name"] == "" and three["objective.name"] == "sapo"
  assert float(one["accuracy_start"]) == 0.1234567891 and float(one["accuracy_final"]) == 0.5 and one["seconds"] == "75.0"
  assert (two["state"], two["attempts"], two["steps"], two["accuracy_final"]) == ("failed", "1", "2", "")
  assert two["error"] == STATUSES[1].error and three["attempts"] == "0"
  assert not list(tmp_path.glob("*.tmp"))


def test_the_table_shows_what_varies():
  lines = table.text(TRIALS, STATUSES).splitlines()
  assert lines[0].split() == ["id", "levels", "name", "state", "step", "accuracy", "wall", "time", "attempts"]
  assert lines[2].split()[1:] == ["(1,", "2)", "finished", "4/4", "12.3%", "->", "50.0%", "1:15", "2"]
  assert "25.0% -> 37.5%  2:02:05" in lines[3] and lines[3].endswith("[bold]")
  assert table.counts(STATUSES) == "1 finished, 1 failed, 1 waiting"


def test_the_live_table_accepts_any_text():
  console = rich.console.Console(file=io.StringIO(), width=200)
  console.print(table.drawn(TRIALS, STATUSES))
  text = console.file.getvalue()
  assert "[bold]" in text and "2:02:05" in text and "1 finished, 1 failed, 1 waiting" in text


def test_help_names_the_targets_own_flags():
  command = [sys.executable, "-m", "experiments.launch", "--help", "--target=slurm"]
  text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
  assert "--max_parallel" in text and "--partition: Partition of the cluster." in text


def test_sweep_json_is_readable(tmp_path):
  trial.record(make_sweep(tmp_path), [make_row({"task.levels": (1, 2)})])
  record = json.loads((tmp_path / "sweep.json").read_text())
  assert record["config"] == BASE[0] and list(record["rows"].values()) == [{"task.levels": [1, 2]}]
